"""Tests of durations: `python3 -m unittest -q checks`."""

import unittest

from durations import format_duration, parse_duration


class DurationChecks(unittest.TestCase):
    def test_units_are_added(self):
        self.assertEqual(parse_duration("1d 2h 3m 4s"), 93_784)

    def test_other_texts_are_refused(self):
        for text in ("", "1", "h", "1h30m", "-1s"):
            with self.assertRaises(ValueError):
                parse_duration(text)

    def test_a_text_of_one_unit(self):
        self.assertEqual([format_duration(n) for n in (0, 59, 60)], ["0s", "59s", "1m"])

    def test_what_was_formatted_is_parsed_again(self):
        for seconds in (61, 3600, 5400, 86_399, 90_061):
            self.assertEqual(parse_duration(format_duration(seconds)), seconds)


if __name__ == "__main__":
    unittest.main()
