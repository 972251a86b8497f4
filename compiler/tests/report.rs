//! The page of `explain --html` in a browser: it opens without a network, modules open and close, a
//! value shows its layout and why, another rank shows its own part.

mod browser;

use browser::Page;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn shardc(args: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_shardc")).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The report of a plan of a tiny model on four ranks.
fn report(dir: &Path) -> PathBuf {
    let (plan, page) = (dir.join("plan.json"), dir.join("report.html"));
    let (plan, page_text) = (plan.to_str().unwrap(), page.to_str().unwrap());
    let pin = "dp=2,tp=2,zero=1";
    shardc(&["plan", "llama-tiny", "--cluster", "cpu:4", "--batch", "8", "--seq", "64", "--pin", pin, "-o", plan]);
    shardc(&["explain", plan, "--html", page_text]);
    page
}

#[test]
fn the_page_needs_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(report(dir.path())).unwrap();
    for outside in ["src=\"http", "href=\"http", "@import", "fetch(", "XMLHttpRequest", "url(http"] {
        assert!(!text.contains(outside), "the page refers to {outside}");
    }
    assert!(!text.contains("__DATA__"));
}

#[test]
fn the_page_works_in_a_browser() {
    let Some(chrome) = browser::find() else {
        eprintln!("skipped: no Chromium on the path and no $CHROME (Debian: apt-get install chromium)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let file = report(dir.path());
    let mut page = Page::open(&chrome, dir.path(), &file, (1366, 768));
    assert!(page.text("#title").contains("llama-tiny on cpu:4"));
    // Nothing is wider than a laptop's screen.
    assert_eq!(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), true);

    // The folded blocks are one module, open at first; a click on its head closes it.
    let inside = "[data-module^='blocks.*.']";
    let opened = page.count(inside);
    assert!(opened > 0, "no module inside the blocks");
    page.click("[data-module='blocks.*'] > .head");
    assert_eq!(page.count(inside), 0);
    page.click("[data-module='blocks.*'] > .head");
    assert_eq!(page.count(inside), opened);
    page.click("#expand");
    assert!(page.count("[data-value]") > 10);

    // A value shows its layout and what the others cost.
    page.enter("#search", "mlp.gate.weight");
    page.click("[data-value]:not(.lost)");
    assert!(page.text("#details").contains("mlp.gate.weight"), "{}", page.text("#details"));
    assert!(page.text("#layout").contains("@"), "{}", page.text("#layout"));
    assert!(page.text("#details").contains("ZeRO-1"));
    assert!(page.count("#options tr") > 2);
    assert_eq!(page.count("#options tr.pick"), 1);

    // Another rank holds another part, and another place in the mesh.
    let (first, place) = (page.text("#slices"), page.text("#rank-text"));
    page.enter("#rank", "3");
    assert_ne!(page.text("#slices"), first);
    assert_ne!(page.text("#rank-text"), place);
    assert!(page.text("#rank-text").contains("dp=1, tp=1"));
    page.enter("#rank", "99");
    assert!(page.text("#rank-text").contains("dp=1, tp=1"), "ranks end at the last");

    // The timeline and the memory are drawn, with several colours.
    for canvas in ["#timeline", "#memory"] {
        let colours = format!(
            "(() => {{ const c = document.querySelector('{canvas}'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
             const s = new Set(); for (let i = 0; i < d.length; i += 4) s.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return s.size; }})()"
        );
        assert!(page.evaluate(&colours).as_u64() > Some(5), "{canvas} is empty");
    }
    assert!(page.count("#alternatives tr") > 2);
    assert!(page.count("#sensitivity tr") > 4);
    assert!(page.count("#collectives tr") > 2);
    for phase in ["backward", "optimizer", "forward"] {
        page.enter("#phase", phase);
        assert!(page.count("[data-module], [data-value]") > 0, "{phase}");
    }
    assert!(page.errors.is_empty(), "{:?}", page.errors);
}
