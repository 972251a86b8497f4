//! The page of `explain --html` in a browser: it opens without a network, modules open and close, a
//! value shows its layout and why, another rank shows its own part.

mod browser;

use base64::prelude::{BASE64_STANDARD, Engine};
use browser::Page;
use flate2::read::ZlibDecoder;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn shardc(args: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_shardc")).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The report of a plan of a tiny model.
fn report_of(dir: &Path, cluster: &str, pin: &str) -> PathBuf {
    let (plan, page) = (dir.join("plan.json"), dir.join("report.html"));
    let (plan, page_text) = (plan.to_str().unwrap(), page.to_str().unwrap());
    shardc(&["plan", "llama-tiny", "--cluster", cluster, "--batch", "8", "--seq", "64", "--pin", pin, "-o", plan]);
    shardc(&["explain", plan, "--html", page_text]);
    page
}

/// That of one on four ranks.
fn report(dir: &Path) -> PathBuf {
    report_of(dir, "cpu:4", "dp=2,tp=2,zero=1")
}

/// What the page is made of.
fn data(page: &Path) -> Value {
    let text = fs::read_to_string(page).unwrap();
    let packed = text.split("id=\"data\">").nth(1).and_then(|rest| rest.split("</script>").next());
    let packed = BASE64_STANDARD.decode(packed.unwrap()).unwrap();
    serde_json::from_reader(ZlibDecoder::new(&packed[..])).unwrap()
}

/// What would change: each condition, and by how much the step does.
fn changes(page: &Path) -> Vec<(String, f64)> {
    let data = data(page);
    let rows = data["sensitivity"]["rows"].as_array().unwrap().iter();
    rows.map(|row| (row["what"].as_str().unwrap().to_string(), row["change"].as_f64().unwrap_or(0.0))).collect()
}

/// All rows are by one measure, so the plan under its own conditions is what it says of itself, whatever its head and
/// its microbatch are cut into; and what does not bind changes nothing at all.
#[test]
fn what_would_change_is_compared_with_the_plan_itself() {
    let dir = tempfile::tempdir().unwrap();
    let pins = ["dp=2,tp=2,microbatch=4,overlap_chunks=2", "dp=4,zero=1,microbatch=2,loss_chunks=2,keep_casts=1"];
    for pin in pins {
        let data = data(&report_of(dir.path(), "h100:4", pin));
        let rows = data["sensitivity"]["rows"].as_array().unwrap();
        assert!(pin.split(',').all(|pin| data["choice"].as_str().unwrap().contains(pin)), "{}", data["choice"]);
        assert_eq!((&rows[0]["choice"], &rows[0]["step"]), (&data["choice"], &data["prediction"]["step"]), "{pin}");
        let room = rows.iter().find(|row| row["what"] == "twice the memory").unwrap();
        assert_eq!((&room["choice"], &room["step"]), (&data["choice"], &data["prediction"]["step"]), "{pin}");
        let memory = rows.iter().find(|row| row["what"] == "twice the memory bandwidth").unwrap();
        assert!(memory["change"].as_f64().unwrap() < 0.0, "{memory}");
        assert!(data["sensitivity"]["note"].as_str().unwrap().contains("all by their programs"), "{pin}");
    }
    // What no program does is predicted like the plan, in all rows.
    let data = data(&report_of(dir.path(), "h100:4", "dp=4,zero=1,offload=optimizer"));
    assert!(
        data["not_as_planned"].as_str().unwrap().contains("no program does offloading"),
        "{}",
        data["not_as_planned"]
    );
    assert!(
        data["sensitivity"]["note"].as_str().unwrap().contains("all predicted as the plan is"),
        "{}",
        data["sensitivity"]
    );
    let first = &data["sensitivity"]["rows"][0];
    assert_eq!((&first["choice"], &first["step"]), (&data["choice"], &data["prediction"]["step"]));
}

/// Where memory binds, more of it makes another plan of the same mesh the fastest, and less of it a slower one.
#[test]
fn what_would_change_with_other_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, page) = (dir.path().join("plan.json"), dir.path().join("page.html"));
    let (plan, page_text) = (plan.to_str().unwrap(), page.to_str().unwrap());
    let pins = ["--pin", "dp=2,zero=1,microbatch=4", "--device-memory", "24GiB"];
    let asked = ["plan", "llama-1b", "--cluster", "h100:2", "--batch", "16", "--seq", "4096", "-o", plan];
    shardc(&[&asked[..], &pins].concat());
    shardc(&["explain", plan, "--html", page_text]);
    let rows = changes(&page);
    let of = |what: &str| rows.iter().find(|row| row.0 == what).unwrap_or_else(|| panic!("{rows:?}")).1;
    assert!(of("twice the memory") < -0.01 && of("10% less memory") > 0.001, "{rows:?}");
    assert!(of("10% more memory") <= 0.0 && of("as it is") == 0.0, "{rows:?}");
}

/// The links of racks are what binds between them, and every kind of node has faster ones.
#[test]
fn what_would_change_with_other_links() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let racks = "device = \"h100\"\nper_node = 2\nnodes = 4\n\
                 [[levels]]\nname = \"rack\"\nnodes = 2\nbandwidth = 1e9\nlatency = 2e-5\n";
    let parts = "per_node = 2\n[[parts]]\ndevice = \"h100\"\nnodes = 1\n[[parts]]\ndevice = \"a100-80\"\nnodes = 1\n";
    let check = |cluster: &str, pin: &str, what: &str| {
        let rows = changes(&report_of(dir.path(), cluster, pin));
        for (word, is_faster) in [("twice", true), ("half", false)] {
            let what = format!("{word} the bandwidth between {what}");
            let (_, change) = rows.iter().find(|row| row.0 == what).unwrap_or_else(|| panic!("{what}: {rows:?}"));
            assert!(if is_faster { *change < -0.001 } else { *change > 0.001 }, "{what}: {rows:?}");
        }
        assert!(rows.iter().any(|row| row.0 == "twice the memory bandwidth" && row.1 < 0.0), "{rows:?}");
    };
    check(&cluster("racks.toml", racks), "dp=8", "racks");
    // Each stage runs on nodes of one kind.
    check(&cluster("parts.toml", parts), "pp=2,dp=2,schedule=1f1b", "nodes");
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
    // Every name is of one element, and what the search says of its bound is there to be read.
    let names = "[...document.querySelectorAll('[id]')].map(element => element.id).sort()";
    assert_eq!(page.evaluate(names), page.evaluate(&format!("[...new Set({names})]")));
    let bound = page.text("p#bound");
    assert!(bound.contains("Estimated at") && bound.contains("% of the least that is possible"), "{bound}");
    assert!(bound.contains("plans estimated"), "{bound}");
    assert_eq!(page.evaluate("document.querySelector('#bound').getBoundingClientRect().height > 0"), true);
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
