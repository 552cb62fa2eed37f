"""Checks of what a `.freeze` file may name, and of how much memory it may take."""
