"""What may be shown of an address."""

import re


def hide(url: str) -> str:
    """An address, or a text with some, without passwords. Which `@` ends a password that has one
    itself nobody can tell: it is the last one before the next address, so too much may be hidden,
    never too little."""
    return re.sub(r"(//[^:\s]*):(?:(?!\s\w+://).)*@", r"\1:***@", url, flags=re.DOTALL)
