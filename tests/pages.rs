//! The pages on adding a pass, a policy and an instruction, followed to the letter.
//!
//! The test copies the sources, makes the files and changes that the pages show, and runs their
//! commands, which must print what the pages say. Of a page's blocks
//! * ```` ```diff ```` is a patch;
//! * ```` ```console ```` holds commands (`$ …`) with their standard output; `…` stands for any text,
//!   alone on a line for any lines;
//! * ```` ```rust ```` and ```` ```ir ```` are new files, whose path is the last one that the
//!   paragraph before names.
//!
//! The copy lies in `target/tmp/pages/tree`, and its commands in `target/tmp/pages/build`. What is built in between lies
//! where it does for this test, so that only what differs is built. On two processors that takes half a minute, and
//! the commands take a minute.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PAGES: [&str; 3] = ["adding-a-pass.md", "adding-a-policy.md", "adding-an-instruction.md"];

/// What a build of the command and of the tests needs.
const SOURCES: [&str; 10] = [
    "Cargo.toml",
    "Cargo.lock",
    "build.rs",
    "benches",
    "emitter",
    "guest",
    "ir",
    "runtime",
    "src",
    "tracer",
];

/// How the copy is built: third-party crates as for this test, which has built them; our own nearly without
/// optimisation. That whose code the tests of the pages execute most is optimised a little: that saves more time than it
/// takes.
const SETTINGS: &str = "\
[net]
offline = true # everything has been downloaded for the build of this test
[build]
incremental = false
[profile.dev.package]
dynasour = { opt-level = 0, debug = false }
dynasour-guest = { opt-level = 0, debug = false }
dynasour-tracer = { opt-level = 0, debug = false }
dynasour-emitter = { opt-level = 0, debug = false }
dynasour-runtime = { opt-level = 0, debug = false }
dynasour-ir = { opt-level = 1, debug = false }
";

/// A block of a page.
#[derive(Debug, PartialEq)]
enum Block<'p> {
    /// A file with its text.
    File(&'p str, String),
    /// A patch for `patch -p1`.
    Patch(String),
    /// A command with its output.
    Command(&'p str, Vec<&'p str>),
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The blocks of a page, in order.
fn blocks(page: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    let mut path = None;
    while let Some(line) = lines.next() {
        let Some(kind) = line.strip_prefix("```") else {
            path = line.split('`').skip(1).step_by(2).filter(|w| w.contains('/')).last().or(path);
            continue;
        };
        let inside: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        let text: String = inside.iter().map(|line| format!("{line}\n")).collect();
        match kind {
            "diff" => blocks.push(Block::Patch(text)),
            "rust" | "ir" => blocks.push(Block::File(path.expect("a path before it"), text)),
            "console" => {
                for line in inside {
                    match (line.strip_prefix("$ "), blocks.last_mut()) {
                        (Some(command), _) => blocks.push(Block::Command(command, Vec::new())),
                        (None, Some(Block::Command(_, output))) => output.push(line),
                        (None, _) => panic!("output without a command: {line}"),
                    }
                }
            }
            other => panic!("a block of the kind {other:?}"),
        }
    }
    blocks
}

/// Does the output have these lines, where `…` stands for any text or any lines?
fn shows(output: &[&str], lines: &[&str]) -> bool {
    match (output, lines) {
        (_, ["…", rest @ ..]) => (0..=output.len()).any(|skip| shows(&output[skip..], rest)),
        ([first, output @ ..], [line, lines @ ..]) => {
            let same = match line.split_once('…') {
                Some((start, end)) => first.starts_with(start) && first.ends_with(end),
                None => first == line,
            };
            same && shows(output, lines)
        }
        (output, lines) => output.is_empty() && lines.is_empty(),
    }
}

/// The files below a folder, or the file itself, by their paths in `from`.
fn files(from: &Path, path: &Path, found: &mut BTreeSet<PathBuf>) {
    let full = from.join(path);
    if full.is_file() {
        found.insert(path.to_owned());
    } else if full.is_dir() && !path.ends_with("target") {
        for entry in fs::read_dir(&full).expect("a folder") {
            files(from, &path.join(entry.expect("readable").file_name()), found);
        }
    }
}

/// Makes `to` equal to `from`; files that are equal already keep their time, for cargo's sake.
fn mirror(from: &Path, parts: &[&str], to: &Path) {
    let (mut wanted, mut there) = (BTreeSet::new(), BTreeSet::new());
    parts.iter().for_each(|part| files(from, Path::new(part), &mut wanted));
    files(to, Path::new(""), &mut there);
    for gone in there.difference(&wanted) {
        fs::remove_file(to.join(gone)).expect("removed");
    }
    for file in wanted {
        let (source, copy) = (from.join(&file), to.join(&file));
        let text = fs::read(&source).expect("readable");
        if fs::read(&copy).ok().as_ref() != Some(&text) {
            fs::create_dir_all(copy.parent().expect("a folder")).expect("made");
            fs::write(&copy, text).expect("written");
            let mode = fs::metadata(&source).expect("it exists").permissions();
            fs::set_permissions(&copy, mode).expect("set");
        }
    }
}

/// Makes a page's files and changes in a copy of the sources.
fn change(page: &str, blocks: &[Block<'_>], tree: &Path) {
    for block in blocks {
        match block {
            Block::File(path, text) => {
                let file = tree.join(path);
                assert!(!file.exists(), "{page}: {path} exists already");
                fs::write(&file, text).unwrap_or_else(|e| panic!("{page}: {path}: {e}"));
            }
            Block::Patch(patch) => {
                let mut child = Command::new("patch")
                    .args(["-p1", "--no-backup-if-mismatch", "--fuzz=3"])
                    .current_dir(tree)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("patch is installed");
                let mut input = child.stdin.take().expect("a pipe");
                input.write_all(patch.as_bytes()).expect("it reads");
                drop(input);
                let output = child.wait_with_output().expect("it ends");
                let said = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success(), "{page}: {said}\n{patch}");
            }
            Block::Command(..) => {}
        }
    }
}

/// Runs a page's command in the copy; it must succeed and print what the page says.
fn follow(page: &str, command: &str, lines: &[&str], tree: &Path, build: &Path) {
    let output = Command::new("sh")
        .args(["-c", &format!("dynasour() {{ \"$DYNASOUR\" \"$@\"; }}\n{command}")])
        .current_dir(tree)
        .env("DYNASOUR", build.join("debug/dynasour"))
        .env("PATH", path_with_cargo())
        .envs(directories(build))
        .output()
        .expect("it runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let ran_no_test = printed.contains("test result: ok. 0 passed");
    assert!(!ran_no_test, "{page}: $ {command} runs no test:\n{printed}");
    let shown: Vec<&str> = printed.lines().collect();
    assert!(
        output.status.success() && shows(&shown, lines),
        "{page}: $ {command}\n{}\nshould print\n{}\nbut prints\n{printed}\n{error}",
        output.status,
        lines.join("\n")
    );
}

/// Where cargo puts the copy's commands, and what it builds for them.
fn directories(build: &Path) -> [(&'static str, PathBuf); 2] {
    let between = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target directory");
    [("CARGO_TARGET_DIR", build.to_owned()), ("CARGO_BUILD_BUILD_DIR", between.to_owned())]
}

/// The search path, with the cargo of this build first.
fn path_with_cargo() -> std::ffi::OsString {
    let folder = Path::new(env!("CARGO")).parent().expect("a folder").to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(folder).chain(std::env::split_paths(&path)))
        .expect("no colon in it")
}

#[test]
fn pages_can_be_followed() {
    let pages = PAGES.map(|page| {
        let text = fs::read_to_string(root().join("docs").join(page)).expect(page);
        (page, text)
    });
    let pages = pages.each_ref().map(|(page, text)| (*page, blocks(text)));
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
    let (fresh, tree, build) = (work.join("fresh"), work.join("tree"), work.join("build"));
    // The changes are made in a copy of their own, so that files of the tree whose text stays the
    // same from test to test are not built again.
    mirror(root(), &[&SOURCES[..], &["tests"]].concat(), &fresh);
    fs::create_dir_all(fresh.join(".cargo")).expect("made");
    fs::write(fresh.join(".cargo/config.toml"), SETTINGS).expect("written");
    for (page, blocks) in &pages {
        change(page, blocks, &fresh);
    }
    mirror(&fresh, &[""], &tree);
    let built = Command::new(env!("CARGO"))
        .args(["build", "--bin", "dynasour"])
        .current_dir(&tree)
        .envs(directories(&build))
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let mut commands = 0;
    for (page, blocks) in &pages {
        if *page == "adding-an-instruction.md" && !is_x86_feature_detected!("adx") {
            eprintln!("skipped: this processor has no ADX, which {page} needs");
            continue;
        }
        for block in blocks {
            if let Block::Command(command, lines) = block {
                follow(page, command, lines, &tree, &build);
                commands += 1;
            }
        }
    }
    assert!(commands >= 10, "{commands}");
}

#[test]
fn blocks_and_output_are_understood() {
    let page = "Write `a/b.rs`, not `c`:\n\n```rust\nfn x() {}\n```\n\n```console\n$ one\n…\nx\n$ two\n```\n\
                ```diff\n-a\n```\n";
    assert_eq!(
        blocks(page),
        [
            Block::File("a/b.rs", "fn x() {}\n".to_owned()),
            Block::Command("one", vec!["…", "x"]),
            Block::Command("two", vec![]),
            Block::Patch("-a\n".to_owned()),
        ]
    );
    for (output, lines, expected) in [
        (&["a", "b"][..], &["a", "b"][..], true),
        (&["a", "b"], &["a"], false),
        (&["a"], &["a", "b"], false),
        (&["a", "b", "c"], &["a", "…"], true),
        (&["a", "b", "c"], &["…", "c"], true),
        (&["a", "b", "c"], &["…", "b"], false),
        (&["a 12 b"], &["a … b"], true),
        (&["a 12 c"], &["a … b"], false),
        (&[], &["…"], true),
    ] {
        assert_eq!(shows(output, lines), expected, "{output:?} {lines:?}");
    }
}
