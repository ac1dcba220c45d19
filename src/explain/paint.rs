//! Colours for terminals. `NO_COLOR` (<https://no-color.org>) and `TERM=dumb` turn them off.

use clap::ValueEnum;
use owo_colors::OwoColorize;
use std::io::IsTerminal;

/// When to use colours.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum When {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// The role of a piece of text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    Plain,
    Title,
    Heading,
    Symbol,
    Count,
    Note,
    Guard,
    Gone,
    New,
}

/// Applies colours, or leaves text plain.
#[derive(Clone, Copy, Debug)]
pub struct Paint(bool);

impl Paint {
    /// For output that goes to standard output, or to a file.
    pub fn new(when: When, to_file: bool) -> Paint {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint(match when {
            When::Auto => !to_file && !refused && !dumb && std::io::stdout().is_terminal(),
            When::Always => true,
            When::Never => false,
        })
    }

    /// A piece of text in its style.
    pub fn text(self, style: Style, text: &str) -> String {
        if !self.0 || text.trim().is_empty() {
            return text.to_string();
        }
        match style {
            Style::Plain => text.to_string(),
            Style::Title => text.bold().to_string(),
            Style::Heading => text.cyan().bold().to_string(),
            Style::Symbol => text.blue().to_string(),
            Style::Count => text.magenta().to_string(),
            Style::Note => text.bright_black().to_string(),
            Style::Guard => text.yellow().to_string(),
            Style::Gone => text.red().to_string(),
            Style::New => text.green().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_only_where_they_are_wanted() {
        assert_eq!(Paint::new(When::Never, false).text(Style::Guard, "x"), "x");
        assert_eq!(Paint::new(When::Always, true).text(Style::Guard, "x"), "\u{1b}[33mx\u{1b}[39m");
        assert_eq!(Paint::new(When::Auto, true).text(Style::Guard, "x"), "x");
    }
}
