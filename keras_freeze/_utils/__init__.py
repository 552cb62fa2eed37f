"""Helpers that know nothing of networks: files, text, threads, checks of arguments."""
