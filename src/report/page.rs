//! Puts the page together: the template, its styles and scripts, and the data.
//!
//! The data is JSON in a script element that browsers do not execute. A `<` in it is written as an
//! escape of JSON, so no name of a guest can end the element. The scripts put texts into the page
//! as text only. A content security policy forbids every request, as a second line of defence.
//!
//! Data: the parts below, compiled in. No lock.
//!
//! Example: the symbol `</script>` becomes `"\u003c/script>"` in the page.

use super::compact;
use super::input::{Input, Study};
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

const TEMPLATE: &str = include_str!("assets/page.html");

const STYLES: [&str; 2] = [include_str!("vendor/uPlot.min.css"), include_str!("assets/style.css")];

/// Scripts of others with their licences.
const VENDOR: [(&str, &str); 2] = [
    (include_str!("vendor/uPlot.LICENSE"), include_str!("vendor/uPlot.iife.min.js")),
    (include_str!("vendor/dagre.LICENSE"), include_str!("vendor/dagre.min.js")),
];

/// The scripts of this page, in the order in which they are executed.
const SCRIPTS: [&str; 7] = [
    include_str!("assets/dom.js"),
    include_str!("assets/plots.js"),
    include_str!("assets/overview.js"),
    include_str!("assets/graph.js"),
    include_str!("assets/code.js"),
    include_str!("assets/studies.js"),
    include_str!("assets/main.js"),
];

/// What the scripts read.
#[derive(Serialize)]
struct Data<'a> {
    version: &'static str,
    runs: Vec<compact::Run<'a>>,
    comparisons: Vec<Named<'a>>,
    sweeps: Vec<Named<'a>>,
    benches: Vec<Named<'a>>,
}

/// A file that the scripts read as it is.
#[derive(Serialize)]
struct Named<'a> {
    name: &'a str,
    content: &'a Value,
}

/// The page for these inputs.
///
/// # Errors
/// The data cannot be written as JSON.
pub fn page(inputs: &[Input]) -> Result<String> {
    let mut data = Data {
        version: env!("CARGO_PKG_VERSION"),
        runs: Vec::new(),
        comparisons: Vec::new(),
        sweeps: Vec::new(),
        benches: Vec::new(),
    };
    for input in inputs {
        match input {
            Input::Explanation { name, explanation } => {
                data.runs.push(compact::run(name, explanation)?);
            }
            Input::Study { kind, name, content } => {
                let list = match kind {
                    Study::Comparison => &mut data.comparisons,
                    Study::Sweep => &mut data.sweeps,
                    Study::Bench => &mut data.benches,
                };
                list.push(Named { name, content });
            }
        }
    }
    let json = serde_json::to_string(&data).context("the data of the page")?;
    Ok(filled(&[
        ("styles", STYLES.map(|style| format!("<style>\n{style}</style>\n")).concat()),
        ("data", escaped(&json)),
        ("scripts", scripts()),
    ]))
}

fn scripts() -> String {
    let vendor =
        VENDOR.map(|(licence, script)| format!("<script>\n/*\n{licence}*/\n{script}\n</script>\n"));
    vendor.concat() + &SCRIPTS.map(|script| format!("<script>\n{script}</script>\n")).concat()
}

/// The template with its places filled. A place is a comment `<!-- NAME -->`.
fn filled(parts: &[(&str, String)]) -> String {
    let mut out = String::new();
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("<!-- ") {
        let Some((name, behind)) = after.split_once(" -->") else { break };
        out.push_str(before);
        if let Some((_, part)) = parts.iter().find(|(part, _)| *part == name) {
            out.push_str(part);
        }
        rest = behind;
    }
    out + rest
}

/// JSON that may stand in a script element.
fn escaped(json: &str) -> String {
    json.replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_ends_the_script_element() {
        let nasty = serde_json::json!({"symbol": "</script><script>alert(1)</script><!--"});
        let text = escaped(&nasty.to_string());
        assert!(!text.contains('<'), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), nasty);
    }

    #[test]
    fn parts_do_not_end_their_elements_and_the_template_is_filled() {
        for script in SCRIPTS.into_iter().chain(VENDOR.map(|(_, script)| script)) {
            assert!(!script.contains("</script") && !script.contains("<!--"));
        }
        for (licence, _) in VENDOR {
            assert!(!licence.contains("*/") && !licence.contains("</script"));
        }
        for style in STYLES {
            assert!(!style.contains("</style"));
        }
        let page = page(&[]).expect("a page");
        for name in ["styles", "data", "scripts"] {
            assert!(!page.contains(&format!("<!-- {name} -->")), "{name}");
            assert_eq!(TEMPLATE.matches(&format!("<!-- {name} -->")).count(), 1);
        }
    }
}
