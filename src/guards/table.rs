//! Tables for a terminal of 100 columns.
//!
//! A table that is wider is divided: its columns go on in another table below, which repeats the first
//! column. Colours are applied after the cells are padded, so they do not change the layout.
//!
//! Data: [`Cell`], a text with its style. No lock.
//!
//! ```text
//! policy  traces  guards          policy  seconds
//! eager        4      12    and   eager     0.500
//! ```

use crate::explain::paint::{Paint, Style};
use std::ops::Range;

/// Columns of the widest table, as of a terminal of the usual size or a page of documentation.
pub const WIDTH: usize = 100;

/// Columns between two cells.
const GAP: usize = 2;

/// A cell of a table.
#[derive(Clone, Debug)]
pub struct Cell {
    text: String,
    style: Style,
}

impl Cell {
    /// A cell in a style.
    pub fn new(text: impl Into<String>, style: Style) -> Cell {
        Cell { text: text.into(), style }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text, Style::Plain)
    }
}

/// The heading of a table: names that are separated by commas.
pub fn heading(names: &str) -> Vec<Cell> {
    names.split(',').map(|name| Cell::new(name, Style::Title)).collect()
}

/// The table, whose first line is its heading. The first column is left-aligned, the others right-aligned.
pub fn table(lines: &[Vec<Cell>], paint: Paint) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(Cell::width).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let parts = parts(&widths);
    let parts = parts.iter().map(|part| part_of(lines, &widths, part.clone(), paint));
    parts.collect::<Vec<_>>().join("\n")
}

/// The columns of each part beside the first column. A part has at least one, however wide it is.
fn parts(widths: &[usize]) -> Vec<Range<usize>> {
    let first = widths.first().copied().unwrap_or(0);
    let (mut parts, mut start, mut used) = (Vec::new(), 1, first);
    for (column, width) in widths.iter().enumerate().skip(1) {
        if used + GAP + width > WIDTH && column > start {
            parts.push(start..column);
            (start, used) = (column, first);
        }
        used += GAP + width;
    }
    parts.push(start..widths.len());
    parts
}

/// The lines of the columns of a part. A line that has no cell in it is left out.
fn part_of(lines: &[Vec<Cell>], widths: &[usize], part: Range<usize>, paint: Paint) -> String {
    let mut out = String::new();
    for line in lines.iter().filter(|line| line.len() > part.start || part.is_empty()) {
        let mut text = String::new();
        let mut waiting = 0;
        for (column, cell) in std::iter::once(0)
            .chain(part.clone())
            .zip(line.first().into_iter().chain(line.get(part.start..).unwrap_or_default()))
        {
            let padding = widths[column] - cell.width();
            let (before, after) = if column == 0 { (0, padding) } else { (GAP + padding, 0) };
            if !cell.text.is_empty() {
                text += &" ".repeat(waiting + before);
                text += &paint.text(cell.style, &cell.text);
                waiting = after;
            } else {
                waiting += before + after;
            }
        }
        out += &text;
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::paint::When;

    fn lines(texts: &[&str]) -> Vec<Vec<Cell>> {
        texts.iter().map(|text| text.split(' ').map(Cell::from).collect()).collect()
    }

    #[test]
    fn a_wide_table_is_divided_by_columns() {
        let paint = Paint::new(When::Never, false);
        let wide = "x".repeat(60);
        let lines = lines(&["name a b", &format!("one {wide} {wide}"), "two DIFFERS"]);
        let shown = table(&lines, paint);
        let pad = " ".repeat(59);
        let expected = format!(
            "name  {pad}a\none   {wide}\ntwo   {}DIFFERS\n\nname  {pad}b\none   {wide}\n",
            " ".repeat(53)
        );
        assert_eq!(shown, expected);
        assert!(shown.lines().all(|line| line.chars().count() <= WIDTH));
    }

    #[test]
    fn colours_do_not_move_cells() {
        let mut lines = lines(&["name a", "one 12"]);
        let plain = table(&lines, Paint::new(When::Never, false));
        lines[1][1].style = Style::Gone;
        let painted = table(&lines, Paint::new(When::Always, false));
        assert_eq!(plain, "name   a\none   12\n");
        assert_eq!(painted, "name   a\none   \u{1b}[31m12\u{1b}[39m\n");
    }
}
