"""What goes wrong with `.freeze` files."""


class FreezeFileError(ValueError):
    """A `.freeze` file that cannot be used: damaged, cut short, of another version or base.

    A ValueError. The message says what is wrong and where.
    """
