//! What README, docs/ and `tests/README.md` say is true: options exist, links have a target, the book
//! has every page, files that the design names exist, the study's page has the tables of its data, and
//! the table of modes is the matrix.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use dynasour_testkit::mode::Mode;

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn docs() -> PathBuf {
    root().join("docs")
}

fn pages() -> Vec<(PathBuf, String)> {
    let entries = fs::read_dir(docs()).expect("docs/").map(|e| e.expect("readable").path());
    let pages = entries.filter(|p| p.extension().is_some_and(|e| e == "md"));
    pages.map(|p| (p.clone(), fs::read_to_string(&p).expect("text"))).collect()
}

#[test]
fn options_exist() {
    let commands = [
        vec!["run"],
        vec!["bench"],
        vec!["explain"],
        vec!["guards"],
        vec!["report"],
        vec!["ir", "opt"],
        vec!["ir", "check"],
        vec!["ir", "diff"],
        vec!["man"],
    ];
    let help: String = commands
        .iter()
        .map(|command| {
            let output =
                Command::new(env!("CARGO_BIN_EXE_dynasour")).args(command).arg("--help").output();
            String::from_utf8(output.expect("it runs").stdout).expect("text")
        })
        .collect();
    let known: Vec<&str> = help.split(|c: char| !c.is_ascii_lowercase() && c != '-').collect();
    let mut seen = 0;
    for (page, text) in pages() {
        for line in text.lines().filter(|l| !l.contains("cargo ") && !l.contains("docs/data/make"))
        {
            let words = line.split(|c: char| !c.is_ascii_lowercase() && c != '-');
            for option in
                words.filter(|w| w.starts_with("--") && w.len() > 3 && !w.starts_with("---"))
            {
                assert!(
                    known.contains(&option),
                    "{}: there is no option {option}: {line}",
                    page.display()
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 30, "{seen}");
}

#[test]
fn links_lead_somewhere() {
    let readme = root().join("README.md");
    let text = fs::read_to_string(&readme).expect("README.md");
    let mut seen = 0;
    for (page, text) in pages().into_iter().chain([(readme, text)]) {
        let folder = page.parent().expect("a file has a folder");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            seen += 1;
            if link.starts_with("http") {
                continue;
            }
            let (file, anchor) =
                link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { folder.join(file) };
            assert!(target.exists(), "{}: {link}", page.display());
            if let Some(anchor) = anchor {
                let text = fs::read_to_string(&target).expect("text");
                let found = anchors(&text).iter().any(|known| known == anchor);
                assert!(found, "{}: {link}: no heading has this anchor", page.display());
            }
        }
    }
    assert!(seen >= 25, "{seen}");
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut anchors: Vec<String> = Vec::new();
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let characters = title.trim().chars().filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
            _ => None,
        });
        let anchor: String = characters.collect();
        // The second heading of one name is NAME-1.
        let before = anchors.iter().filter(|known| **known == anchor).count();
        anchors.push(if before == 0 { anchor } else { format!("{anchor}-{before}") });
    }
    anchors
}

#[test]
fn anchors_are_made_as_mdbook_makes_them() {
    let page = "# A `b`, c\n```\n# no heading\n```\n#hash\n## 3.1 D_e-f\n# A `b`, c\n";
    assert_eq!(anchors(page), ["a-b-c", "31-d_e-f", "a-b-c-1"]);
}

/// `docs/SUMMARY.md`, the table of contents of the book, links to every page once and to nothing else.
#[test]
fn the_book_has_every_page() {
    let summary = fs::read_to_string(docs().join("SUMMARY.md")).expect("docs/SUMMARY.md");
    let links = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let mut links: Vec<PathBuf> = links.map(|link| docs().join(link)).collect();
    links.sort();
    let mut pages: Vec<PathBuf> = pages().into_iter().map(|(page, _)| page).collect();
    pages.retain(|page| !page.ends_with("SUMMARY.md"));
    pages.sort();
    assert_eq!(links, pages);
    // What mdBook accepts: titles of parts, and one link on a line.
    for line in summary.lines().filter(|line| !line.is_empty()) {
        let is_link = line.trim_start().trim_start_matches("- ").starts_with('[');
        assert!(is_link && line.ends_with(".md)") || line.starts_with("# "), "{line}");
    }
    let settings = fs::read_to_string(docs().join("book.toml")).expect("docs/book.toml");
    let settings: toml::Table = settings.parse().expect("TOML");
    assert_eq!(settings["book"]["src"].as_str(), Some("."));
}

/// `docs/design.md` says of everything which file does it, by its path in the repository. Words
/// between backquotes are every other piece of a line.
#[test]
fn files_that_the_design_names_exist() {
    let page = fs::read_to_string(docs().join("design.md")).expect("docs/design.md");
    let mut seen = 0;
    for line in page.lines() {
        for path in line.split('`').skip(1).step_by(2).filter(|word| word.ends_with(".rs")) {
            assert!(
                root().join(path).is_file(),
                "docs/design.md names {path}, which does not exist: {line}"
            );
            seen += 1;
        }
    }
    assert!(seen >= 100, "{seen}");
}

/// Comments cite `docs/design.md` by the titles of its sections.
#[test]
fn sections_of_the_design_that_are_cited_exist() {
    let page = fs::read_to_string(docs().join("design.md")).expect("docs/design.md");
    let titles: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let mut seen = 0;
    for folder in ["emitter", "guest", "ir", "runtime", "src", "tests", "tracer"] {
        for file in sources(&root().join(folder)) {
            let source = fs::read_to_string(&file).expect("text");
            // A citation may be split over two lines of a comment.
            let comments =
                source.lines().map(|line| line.trim_start().trim_start_matches(['/', '!']).trim());
            let text = comments.collect::<Vec<_>>().join(" ");
            for rest in text.split("docs/design.md").skip(1) {
                let Some(cited) = rest.trim_start_matches('`').strip_prefix(", \"") else {
                    continue;
                };
                let title = cited.split('"').next().unwrap_or(cited);
                assert!(
                    titles.contains(&title),
                    "{}: docs/design.md has no section {title}",
                    file.display()
                );
                seen += 1;
            }
        }
    }
    assert!(seen >= 30, "{seen}");
}

/// All Rust files below `folder`, but for those that cargo makes.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("readable").path();
        if path.is_dir() && !path.ends_with("target") {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found
}

#[test]
fn the_study_shows_its_data() {
    let output = Command::new(docs().join("data/make")).arg("--tables").output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tables = String::from_utf8(output.stdout).expect("text");
    let page = fs::read_to_string(docs().join("placement-study.md")).expect("the page");
    let rows: Vec<&str> = tables.lines().filter(|l| l.starts_with("| ")).collect();
    assert!(rows.len() >= 25, "{tables}");
    for row in rows {
        assert!(page.contains(row), "the page does not have the row {row}");
    }
}

/// The table of modes in `tests/README.md`: names, flags and order are those of the matrix. The
/// seed is written SEED there.
#[test]
fn modes_are_those_of_the_matrix() {
    let page = root().join("tests/README.md");
    let page = fs::read_to_string(page).expect("the page");
    let section = page
        .split("## Modes")
        .nth(1)
        .and_then(|s| s.split("\n## ").next())
        .expect("the section on modes");
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let shown: Vec<(&str, String)> = rows
        .map(|row| {
            let mut cells = row.split('`');
            let (name, flags) = (cells.nth(1).expect("a name"), cells.nth(1).expect("flags"));
            (name, flags.to_owned())
        })
        .collect();
    let matrix: Vec<(&str, String)> = Mode::all()
        .iter()
        .map(|mode| {
            let flags = mode.flags.iter().map(|flag| match flag.split_once(',') {
                Some((rate, _seed)) => format!("{rate},SEED"),
                None => flag.clone(),
            });
            (mode.name, flags.collect::<Vec<_>>().join(" "))
        })
        .collect();
    assert_eq!(shown, matrix);
}
