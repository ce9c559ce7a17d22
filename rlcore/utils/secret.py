"""Remove passwords from addresses before they are shown."""

import re


def hide(url: str) -> str:
    """Hide the passwords of URLs in a text. A password may contain `@`, so everything up to the
    last `@` before the next URL is hidden; this may hide too much, but never too little."""
    return re.sub(r"(//[^:\s]*):(?:(?!\s\w+://).)*@", r"\1:***@", url, flags=re.DOTALL)
