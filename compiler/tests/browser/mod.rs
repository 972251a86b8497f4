//! A headless Chromium driven over its DevTools protocol, through two named pipes.
//!
//! The protocol is JSON messages that end with a zero byte (`--remote-debugging-pipe` reads them from
//! file descriptor 3 and writes them to 4; a shell connects these to the pipes).

use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The names under which Chromium is installed.
const NAMES: [&str; 5] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"];

/// The browser of this machine: `$CHROME`, or the first known name on the path.
pub fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("CHROME") {
        return Some(PathBuf::from(path));
    }
    let path = std::env::var_os("PATH")?;
    let dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    NAMES.iter().flat_map(|name| dirs.iter().map(move |dir| dir.join(name))).find(|path| path.is_file())
}

/// A page in a browser.
pub struct Page {
    browser: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    next: u64,
    /// Errors that the page's scripts raised.
    pub errors: Vec<String>,
}

impl Page {
    /// Opens a file in a window of this size, and waits until the page says that it is drawn, or raises an error.
    pub fn open(browser: &Path, dir: &Path, file: &Path, (width, height): (u64, u64)) -> Self {
        let pipe = |name: &str| {
            let path = dir.join(name);
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            path
        };
        let (to, from) = (pipe("to"), pipe("from"));
        let quote = |path: &Path| format!("'{}'", path.display());
        let profile = dir.join("profile");
        let line = format!(
            "exec {} --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
             --host-resolver-rules='MAP * ~NOTFOUND' --user-data-dir={} --remote-debugging-pipe \
             --window-size={width},{height} about:blank 3<{} 4>{}",
            quote(browser),
            quote(&profile),
            quote(&to),
            quote(&from)
        );
        let browser =
            Command::new("sh").args(["-c", &line]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Opening a pipe waits for its other end, in the order in which the shell opens them.
        let to = OpenOptions::new().write(true).open(&to).unwrap();
        let from = BufReader::new(File::open(&from).unwrap());
        let mut page = Self { browser, to, from, session: None, next: 0, errors: Vec::new() };
        let target = page.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let session = page.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        page.session = session["sessionId"].as_str().map(str::to_string);
        page.call("Runtime.enable", json!({}));
        page.call("Page.enable", json!({}));
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        page.call("Emulation.setDeviceMetricsOverride", size);
        page.call("Page.navigate", json!({"url": format!("file://{}", file.display())}));
        while page.errors.is_empty() && page.evaluate("document.documentElement?.dataset.drawn") != "" {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        page
    }

    /// Calls a method of the protocol, and waits for what it gives.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut answer = Vec::new();
            self.from.read_until(0, &mut answer).unwrap();
            assert!(!answer.is_empty(), "the browser ended at {method}");
            let answer: Value = serde_json::from_slice(&answer[..answer.len() - 1]).unwrap();
            if answer["method"] == "Runtime.exceptionThrown" {
                self.errors.push(answer["params"]["exceptionDetails"].to_string());
            }
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// The value of a JavaScript expression.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].clone()
    }

    /// The text of an element.
    pub fn text(&mut self, selector: &str) -> String {
        let text = self.evaluate(&format!("document.querySelector({selector:?}).textContent"));
        text.as_str().unwrap_or_default().to_string()
    }

    /// How many elements a selector finds.
    pub fn count(&mut self, selector: &str) -> u64 {
        self.evaluate(&format!("document.querySelectorAll({selector:?}).length")).as_u64().unwrap_or(0)
    }

    /// Clicks an element with the mouse, where it is.
    pub fn click(&mut self, selector: &str) {
        let middle = format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.scrollIntoView({{block: 'center', behavior: 'instant'}}); \
             const r = e.getBoundingClientRect(); return [r.x + Math.min(r.width / 2, 60), r.y + Math.min(r.height / 2, 10)]; }})()"
        );
        let place = self.evaluate(&middle);
        for kind in ["mousePressed", "mouseReleased"] {
            let event = json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Gives an input a value, as typing does.
    pub fn enter(&mut self, selector: &str, value: &str) {
        self.evaluate(&format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.value = {value:?}; \
             e.dispatchEvent(new Event('input', {{bubbles: true}})); e.dispatchEvent(new Event('change', {{bubbles: true}})); }})()"
        ));
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.browser.kill();
        let _ = self.browser.wait();
    }
}
