//! `dynasour report`: the page of a real run in a real browser, its size, its escaping, and the input
//! that is refused.
//!
//! The browser is headless Chromium. If it is not installed, what needs it is skipped with a message;
//! with `DYNASOUR_REQUIRE_PROGRAMS=1` that fails.

use dynasour_testkit::run::{Invocation, Outcome, Status, refused, text};
use dynasour_testkit::scratch;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A symbol that would end the script element, if the page did not escape it.
const NASTY: &str = "</script><img src=x onerror=alert(1)><!--";

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report_command").join(name);
    scratch::fresh(&directory).expect("a scratch directory");
    directory
}

/// The guest of `explain`, with debug information, whose hot function has this name.
fn guest(directory: &Path, symbol: &str) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/explain/thousand.c");
    let built = directory.join("built");
    let run = |program: &str, words: &[&str]| {
        let status = Command::new(program).args(words).status().expect("it is installed");
        assert!(status.success(), "{program} {words:?}");
    };
    let [source, built] = [&source, &built].map(|path| path.to_str().expect("UTF-8"));
    run("cc", &["-O2", "-g", "-o", built, source]);
    let file = directory.join("program").into_os_string().into_string().expect("UTF-8");
    run("objcopy", &["--redefine-sym", &format!("work={symbol}"), built, &file]);
    file
}

fn dynasour(directory: &Path, words: &[&str]) -> Outcome {
    Invocation::new(env!("CARGO_BIN_EXE_dynasour"), directory).args(words).run()
}

/// The page that `report` makes with these words.
#[track_caller]
fn page(directory: &Path, words: &[&str]) -> String {
    let words = [&["report", "--force", "--output", "page.html"], words].concat();
    let outcome = dynasour(directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    assert_eq!(text(&outcome.stdout), "");
    fs::read_to_string(directory.join("page.html")).expect("the page")
}

/// Writes what a command prints to a file, and returns the file's name.
#[track_caller]
fn saved<'n>(directory: &Path, name: &'n str, words: &[&str]) -> &'n str {
    let outcome = dynasour(directory, words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    fs::write(directory.join(name), &outcome.stdout).expect("written");
    name
}

/// The data of a page.
fn data(page: &str) -> Value {
    let start = "<script type=\"application/json\" id=\"data\">";
    let (_, rest) = page.split_once(start).expect("the data");
    let (json, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(json).expect("JSON")
}

/// The document after the scripts have run, as the browser sees it. Every message of a script is an
/// error here. None without a browser.
fn opened(directory: &Path, file: &str, query: &str, more: &[&str]) -> Option<String> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = |name: &&str| std::env::split_paths(&path).any(|p| p.join(name).is_file());
    let Some(browser) = names.into_iter().find(there) else {
        assert!(
            std::env::var_os("DYNASOUR_REQUIRE_PROGRAMS").is_none(),
            "chromium is not installed"
        );
        eprintln!("skipped: chromium is not installed");
        return None;
    };
    let profile = format!("--user-data-dir={}", directory.join("profile").display());
    let address = format!("file://{}{query}", directory.join(file).display());
    let mut invocation = Invocation::new(browser, directory).args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        "--window-size=1400,1000",
        &profile,
    ]);
    invocation = invocation.args(more).args(["--dump-dom", &address]);
    invocation.limit = Duration::from_secs(120);
    let outcome = invocation.run();
    let messages = text(&outcome.stderr);
    assert_eq!(outcome.status, Status::Exited(0), "{messages}");
    let console: Vec<&str> = messages.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(console.is_empty(), "{console:?}");
    Some(text(&outcome.stdout))
}

/// The page with a script behind it that calls `test(name, holds)`; the browser must run it to the end,
/// and each test must hold.
fn tested(directory: &Path, script: &str) {
    let page = fs::read_to_string(directory.join("page.html")).expect("the page");
    let script = format!(
        "<script>\"use strict\";\n\
         const failures = [];\n\
         const test = (name, holds) => holds || failures.push(name);\n\
         const press = (key, at = document.body) =>\n\
           at.dispatchEvent(new KeyboardEvent('keydown', {{ key, bubbles: true, cancelable: true }}));\n\
         try {{ {script} }} catch (error) {{ failures.push(String(error)); }}\n\
         document.body.append(Object.assign(document.createElement('output'),\n\
           {{ id: 'result', textContent: failures.join('; ') || 'all hold' }}));</script></body>"
    );
    let copy = page.replace("</body>", &script);
    assert_ne!(copy, page);
    fs::write(directory.join("tested.html"), copy).expect("written");
    let Some(document) = opened(directory, "tested.html", "", &[]) else { return };
    let (_, result) = document.split_once("<output id=\"result\">").expect("the script ran");
    assert_eq!(result.split('<').next(), Some("all hold"));
}

/// A page refers to nothing outside of itself.
#[track_caller]
fn alone(page: &str) {
    for reference in ["src=\"", "src='", "@import", "fetch(", "XMLHttpRequest", "import("] {
        assert!(!page.contains(reference), "{reference}");
    }
    for place in page.split("url(").skip(1) {
        assert!(place.starts_with('#'), "{}", &place[..40]);
    }
    for link in page.split("href=\"").skip(1) {
        assert!(link.starts_with('#') || link.starts_with("data:,"), "{}", &link[..40]);
    }
}

#[test]
fn a_program_becomes_a_page_that_a_browser_shows() {
    let directory = directory("program");
    let guest = guest(&directory, "work");
    let page = page(&directory, &["--threshold", "100", "--", &guest, "3000000"]);
    alone(&page);
    assert!(page.len() < 1_000_000, "{}", page.len());
    let run = &data(&page)["runs"][0];
    assert_eq!(run["regions"][0]["symbol"], "work+0x28");
    assert!(run["timeline"]["phases"]["native"].is_array(), "{}", run["timeline"]);
    let source = &run["sources"][0];
    assert!(source["path"].as_str().is_some_and(|path| path.ends_with("thousand.c")), "{source}");

    let Some(light) = opened(&directory, "page.html", "?theme=light", &[]) else { return };
    for part in [
        "data-theme=\"light\"",
        "data-ready=\"true\"",
        "id=\"summary\"",
        "id=\"time\"",
        "<canvas",
        "id=\"regions\"",
        "class=\"flame version\"",
        "id=\"graph\"",
        "class=\"edge\"",
        "id=\"code\"",
        "sum += i;",
        "id=\"guards\"",
    ] {
        assert!(light.contains(part), "{part}");
    }
    assert!(!light.contains("<p class=\"trouble\">"));
    let dark = opened(&directory, "page.html", "?theme=dark", &[]).expect("the same browser");
    let narrow = opened(&directory, "page.html", "?theme=light", &["--window-size=420,900"]);
    assert!(narrow.is_some_and(|narrow| narrow.contains("data-ready=\"true\"")));
    assert!(dark.contains("data-theme=\"dark\"") && dark.contains("data-ready=\"true\""));
    let shot = |theme: &str| {
        let file = directory.join(format!("{theme}.png"));
        let option = format!("--screenshot={}", file.display());
        opened(&directory, "page.html", &format!("?theme={theme}"), &[&option]);
        fs::read(file).expect("a screenshot")
    };
    assert_ne!(shot("light"), shot("dark"));
}

#[test]
fn keys_filters_and_links_work() {
    let directory = directory("keys");
    let guest = guest(&directory, "work");
    page(&directory, &["--threshold", "100", "--", &guest]);
    tested(
        &directory,
        "press('?'); test('help', help.open); help.close();
         press('t'); test('theme', root.dataset.theme !== 'auto');
         press('/'); const filter = document.getElementById('filter');
         test('filter has the focus', document.activeElement === filter);
         const rows = () => [...document.querySelectorAll('.guard-table tbody tr')];
         const before = rows().length;
         filter.value = 'kind:branch failed>0'; filter.dispatchEvent(new Event('input'));
         test('filtered', rows().length > 0 && rows().length < before);
         test('only those', rows().every((row) => row.cells[2].textContent === 'branch' && row.cells[6].textContent !== '0'));
         const numbers = () => [...document.querySelectorAll('.guard-table tbody tr')].map((row) => row.cells[5].textContent);
         filter.value = ''; filter.dispatchEvent(new Event('input'));
         document.querySelectorAll('.guard-table th button')[5].click();
         const down = numbers(); document.querySelectorAll('.guard-table th button')[5].click();
         test('sorted', down[0] !== numbers()[0] && down.at(0) === numbers().at(-1));
         rows()[0].click(); test('a row opens its code', state.guard !== null);
         const trace = state.version; press(']'); const next = state.version; press('[');
         test('next trace', next !== trace || state.version !== trace);
         select({ version: currentRun().regions[0].versions[0].id, guard: null });
         const lists = [...document.querySelectorAll('.lines')];
         const guarded = lists[0].querySelector('.line[data-keys]:has(.guard-chip)');
         guarded.click();
         test('linked in all columns', lists.every((list) => list.querySelector('.linked')));
         const multiplied = [...lists[0].children].find((line) => line.textContent.includes('imul'));
         multiplied.click();
         test('an instruction without a guard is linked', lists.every((list) => list.querySelector('.linked')?.textContent.includes('mul')));
         guarded.click(); press('ArrowDown', lists[0]); test('the cursor moves', !guarded.classList.contains('cursor'));
         const passes = document.querySelector('.ir').parentElement.querySelector('select');
         passes.value = '1'; passes.dispatchEvent(new Event('change'));
         document.querySelector('.column input').click();
         test('changes are shown', document.querySelector('.ir .new') && document.querySelector('.ir .gone'));",
    );
}

#[test]
fn names_of_the_guest_stay_text() {
    let directory = directory("escaping");
    let guest = guest(&directory, NASTY);
    let page = page(&directory, &["--threshold", "100", "--", &guest]);
    assert!(!page.contains("<img"), "the symbol is in the page as HTML");
    let symbol = &data(&page)["runs"][0]["regions"][0]["symbol"];
    assert!(symbol.as_str().is_some_and(|s| s.starts_with(NASTY)), "{symbol}");
    let Some(document) = opened(&directory, "page.html", "", &[]) else { return };
    assert!(document.contains("&lt;/script&gt;&lt;img src=x"), "shown as text");
    let elements = document.split("<script").next().expect("the beginning");
    assert!(!elements.contains("<img"), "the symbol became an element");
}

#[test]
fn studies_become_plots() {
    let directory = directory("studies");
    let guest = guest(&directory, "work");
    let policies = ["--policies", "eager,default", "--no-deopt-cost", "--threshold", "1000"];
    let guards =
        [&["guards", "--short", "--json", "--runs", "2"], &policies[..], &["--", &guest]].concat();
    let guards = saved(&directory, "guards", &guards);
    let sweep =
        ["guards", "--short", "--json", "--chaos-sweep", "--rates", "10,100", "--runs", "2"];
    let sweep = [&sweep[..], &["--threshold", "1000", "--", &guest]].concat();
    let sweep = saved(&directory, "sweep", &sweep);
    let suite = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/suites/kernels.toml");
    let suite = suite.to_str().expect("UTF-8");
    let bench = ["bench", "--json", "--small", "--runs", "2", "--tiers", "copy,full", "--only"];
    let bench = saved(&directory, "bench", &[&bench[..], &["sieve-O2", suite]].concat());
    let explain = ["explain", "--json", "--tier", "dynamo", "--threshold", "100", "--", &guest];
    let explained = saved(&directory, "explained", &explain);

    let page = page(&directory, &[guards, sweep, bench, explained]);
    alone(&page);
    let data = data(&page);
    for kind in ["comparisons", "sweeps", "benches", "runs"] {
        assert_eq!(data[kind].as_array().map(Vec::len), Some(1), "{kind}");
    }
    let Some(document) = opened(&directory, "page.html", "", &[]) else { return };
    for part in
        ["id=\"policies\"", "class=\"interval\"", "id=\"chaos\"", "id=\"bench\"", "sieve-O2"]
    {
        assert!(document.contains(part), "{part}");
    }
    assert!(!document.contains("<p class=\"trouble\">"));
}

#[test]
fn bad_input_is_refused() {
    let directory = directory("bad");
    let write =
        |name: &str, content: &str| fs::write(directory.join(name), content).expect("written");
    let report = |words: &[&str]| dynasour(&directory, &[&["report"], words].concat());
    write("old", r#"{"schema": 1, "regions": []}"#);
    refused(&report(&["old"]), &["old has schema 1", "run `explain` again"]);
    write("other", r#"{"a": 1}"#);
    refused(&report(&["other"]), &["other is not the JSON of explain, guards or bench"]);
    write("text", "policy  traces");
    refused(&report(&["text"]), &["text is not JSON"]);
    write("census", r#"{"fragments": [], "images": []}"#);
    refused(&report(&["census"]), &["census of `run --count`", "explain --json"]);
    write("broken", r#"{"format": "dynasour-bench-1", "rows": [1]}"#);
    refused(&report(&["broken"]), &["broken is not what `bench --json`"]);
    refused(&report(&["missing"]), &["cannot read missing"]);
    refused(&report(&[]), &["FILE"]);
    refused(&report(&["--tier", "full", "old"]), &["PROG"]);
    refused(&report(&["--output", "p", "--", "/nonexistent/program"]), &["was not explained"]);
    assert!(!directory.join("p").exists() && !directory.join("dynasour-report.html").exists());
}

#[test]
fn nothing_is_overwritten_and_nothing_runs_without_an_output() {
    let directory = directory("output");
    let marker = directory.join("ran");
    let script = format!("touch {}", marker.display());
    write_mine(&directory);
    let words = ["report", "--output", "mine", "--", "sh", "-c", &script];
    refused(&dynasour(&directory, &words), &["mine exists", "--force"]);
    let words = ["report", "--output", "no/such/page", "--", "sh", "-c", &script];
    refused(&dynasour(&directory, &words), &["cannot write no/such/page"]);
    assert!(!marker.exists(), "the program ran");
    assert_eq!(fs::read_to_string(directory.join("mine")).expect("readable"), "mine");

    // A failure leaves what was there.
    let words = ["report", "--force", "--output", "mine", "--", "/nonexistent/program"];
    refused(&dynasour(&directory, &words), &["was not explained"]);
    assert_eq!(fs::read_to_string(directory.join("mine")).expect("readable"), "mine");

    let words = ["report", "--force", "--output", "mine", "--", "sh", "-c", &script];
    let outcome = dynasour(&directory, &words);
    assert_eq!(outcome.status, Status::Exited(0), "{}", text(&outcome.stderr));
    assert!(marker.exists());
    let page = fs::read_to_string(directory.join("mine")).expect("readable");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));

    let words = ["report", "--output", "-", "--", "sh", "-c", &script];
    let outcome = dynasour(&directory, &words);
    assert!(text(&outcome.stdout).starts_with("<!DOCTYPE html>"));
}

fn write_mine(directory: &Path) {
    let file = directory.join("mine");
    fs::write(&file, "mine").expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its mode");
}

/// Many traces with long texts: the page stays small whatever the explanation has.
#[test]
fn pages_of_large_explanations_are_small() {
    let directory = directory("large");
    let input = directory.join("input");
    let numbers: String =
        (0..400_000u64).map(|n| format!("{:x}\n", (n * n).wrapping_mul(2_654_435_761))).collect();
    fs::write(&input, numbers).expect("written");
    let input = input.to_str().expect("UTF-8");
    let options = ["--tier", "full", "--threshold", "300", "--top", "1000", "--discard-output"];
    let page = page(&directory, &[&options[..], &["--", "xz", "-T1", "-1", "-c", input]].concat());
    let data = data(&page);
    let traces = data["runs"][0]["traces"].as_u64().expect("a number");
    assert!(traces > 50, "{traces}");
    assert!(page.len() < 5_000_000, "{}", page.len());
    let Some(document) = opened(&directory, "page.html", "", &[]) else { return };
    assert!(
        document.contains("data-ready=\"true\"") && !document.contains("<p class=\"trouble\">")
    );
}
