"""Remove passwords from addresses before they are shown."""

import re


def hide(url: str) -> str:
    """Hide the passwords of addresses in a text. As a password may contain `@`, it ends at the last
    `@` before the next address, so that too much may be hidden, but never too little."""
    return re.sub(r"(//[^:\s]*):(?:(?!\s\w+://).)*@", r"\1:***@", url, flags=re.DOTALL)
