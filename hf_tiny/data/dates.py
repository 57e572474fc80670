"""Dates in English and in Korean words, 1000 to 9999."""

from datetime import date

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    **{"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"},
}
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October"),
    *("November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KOREAN_DIGITS = ("", *"일이삼사오육칠팔구")
KOREAN_MONTHS = {6: "유월", 10: "시월"}  # not as the numbers are said
KOREAN_WEEKDAYS = "월화수목금토일"
FORMS = 3


def pair(day: date, form: int) -> tuple[str, str]:
    """English in one of its forms, and Korean."""
    weekday, month = WEEKDAYS[day.weekday()], MONTHS[day.month - 1]
    ordinal, year = english_ordinal(day.day), english_year(day.year)
    forms = (
        f"{weekday}, {month} {ordinal}, {year}",
        f"{weekday} the {ordinal} of {month} {year}",
        f"the {ordinal} of {month}, {year}, a {weekday}",
    )
    month = KOREAN_MONTHS.get(day.month, f"{korean(day.month)}월")
    return forms[form], f"{korean(day.year)}년 {month} {korean(day.day)}일 {KOREAN_WEEKDAYS[day.weekday()]}요일"


def english(number: int) -> str:
    """Below 100."""
    if number < 20:
        return ONES[number]
    tens, ones = TENS[number // 10 - 2], number % 10
    return f"{tens}-{ONES[ones]}" if ones else tens


def english_ordinal(number: int) -> str:
    """Below 40."""
    before, dash, last = english(number).rpartition("-")
    return before + dash + ORDINALS.get(last, f"{last}th")


def english_year(year: int) -> str:
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return f"{ONES[century // 10]} thousand{f' {ONES[rest]}' if rest else ''}"
    return f"{english(century)} {english(rest) if rest > 9 else f'oh {ONES[rest]}' if rest else 'hundred'}"


def korean(number: int) -> str:
    """Below 10,000; one ten, hundred or thousand is said without the one."""
    words = ""
    for digit, unit in zip(f"{number:04d}", ("천", "백", "십", ""), strict=True):
        if digit != "0":
            words += unit if digit == "1" and unit else KOREAN_DIGITS[int(digit)] + unit
    return words
