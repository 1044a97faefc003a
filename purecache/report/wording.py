"""Numbers and names as the page writes them."""

from purecache.report.model import Report


def count(value: float) -> str:
    """A count in full."""
    return f"{value:,.0f}"


def amount(number: float, noun: str) -> str:
    """A count with what is counted."""
    return f"{count(number)} {noun}" + "s" * (number != 1)


def percent(share: float) -> str:
    """A share of 1 in percent."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %"


def name_of(name: str) -> str:
    """A name as it is shown."""
    return {"computed": "not cached", "in_flight": "in flight"}.get(name, name.replace("_", " "))


def moment(report: Report, value: float) -> str:
    """A place on the axis in full."""
    return f"{value:,.{1 if abs(value) >= 1000 else 3}f}" if report.axis == "seconds" else count(value)
