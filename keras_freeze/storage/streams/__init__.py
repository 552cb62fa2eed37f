"""Streams: a trainer writes what has changed to a folder, and followers bring models up to date."""
