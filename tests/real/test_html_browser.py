"""The page in a real browser: no error in its console, no request, pictures on a phone and on a desk."""

import json
import shutil
import subprocess

import pytest

from sim.planning.jobs import run_serially
from sim.planning.vary import parse_vary
from sim.planning.whatif import what_if
from sim.planning.whatif_html import whatif_page
from tests.test_html import source

pytestmark = pytest.mark.real

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [400, 1400])
def test_page_in_a_browser(tmp_path, width):
    answer = what_if(source(), parse_vary(["max-num-seqs=8,1"]), run_serially, replications=2)
    page, shot, log = tmp_path / "page.html", tmp_path / "page.png", tmp_path / "net.json"
    page.write_text(whatif_page(answer, "browser"), encoding="utf-8")
    done = subprocess.run(
        [
            BROWSER,
            *QUIET,
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},1600",
            f"--log-net-log={log}",
            f"--screenshot={shot}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    assert shot.stat().st_size > 20_000
    # The browser's own errands go elsewhere; the page may not cause any.
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    urls = {str(e.get("params", {}).get("url", "")) for e in events}
    initiators = {str(e.get("params", {}).get("initiator", "")) for e in events}
    assert not [i for i in initiators if i.startswith("file")]
    assert not [u for u in urls if "browser" in u and u.startswith("http") and "google" not in u]
