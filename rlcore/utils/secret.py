"""Removal of passwords from addresses that are shown."""

import re


def hide(url: str) -> str:
    """Hide the passwords of addresses in a text. If a password contains `@`, its end is ambiguous:
    the last `@` before the next address counts, so too much may be hidden, never too little."""
    return re.sub(r"(//[^:\s]*):(?:(?!\s\w+://).)*@", r"\1:***@", url, flags=re.DOTALL)
