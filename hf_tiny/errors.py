"""The one exception for mistakes that a person can mend."""


class InputError(ValueError):
    """What was wrong, where, and what to do. Recipes print it without a traceback and exit with 2."""
