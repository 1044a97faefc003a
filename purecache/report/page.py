"""The page: one HTML file with everything in it, that asks nothing of any network. Needs the extra `report`."""

import base64
import hashlib
from importlib import resources

try:
    import jinja2
    from markupsafe import Markup

    from purecache.report import views
except ImportError as error:
    raise ImportError(f"the page needs {error.name}: pip install 'purecache[report]'") from error

from purecache.report import wording
from purecache.report.lanes import AREA_HEIGHT, BAR_HEIGHT, timeline
from purecache.report.model import Report

_TEMPLATES = resources.files("purecache.report") / "templates"


def page_of(report: Report) -> str:
    """The HTML of a report. The same report gives the same bytes.

    Styles and scripts run only if they have the hashes that the page's own policy names; nothing is loaded.
    """
    style, script = (_TEMPLATES.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("purecache.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": wording.count, "percent": wording.percent, "name": wording.name_of}
    environment.globals["moment"] = lambda value: wording.moment(report, value)
    shares = views.hit_shares(report)
    return environment.get_template("page.html").render(
        report=report,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        shares=shares,
        hit_rate=sum(share for where, share in shares.items() if where != "computed"),
        tiles=views.tiles(report),
        stocks=views.stock_charts(report),
        hits=views.hit_chart(report),
        timeline=timeline(report),
        transfers=views.transfers_table(report),
        maps={width: views.blocks(report, width) for width in views.MAPS} if report.prefixes else {},
        modes=_modes(report),
        hottest=views.hottest(report),
        area_height=AREA_HEIGHT,
        bar_height=BAR_HEIGHT,
    )


def _policy(style: str, script: str) -> str:
    """The content security policy: nothing but the page's own style and script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}';"
        " base-uri 'none'; form-action 'none'"
    )


def _modes(report: Report) -> list[tuple[str, str]]:
    """What the tree map can be coloured by: (name, title)."""
    modes = [("h", "Hits")]
    if any(prefix.tiers for prefix in report.prefixes):
        modes.insert(0, ("t", "Tier"))
    if any(prefix.heat is not None for prefix in report.prefixes):
        modes.append(("r", "Recency"))
    if any("storage" in prefix.tiers for prefix in report.prefixes):
        modes.append(("s", "Storage"))
    return modes
