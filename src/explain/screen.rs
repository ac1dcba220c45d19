//! The text of `dynasour explain`: what fits on a screen first, and parts of versions if they are asked
//! for.
//!
//! A [`Screen`] takes lines, and cuts each at the width of the output. [`page`] prints the run, the table of
//! heads, and each region: its versions, the hottest guest code, the guards that fail most. With `--show`,
//! the parts of each version follow instead ([`super::text`]), which are not cut.
//!
//! Data: [`Screen`], the text so far. No lock. README.md shows a page.

use super::guest::Block;
use super::heads;
use super::model::{Body, Explanation, InRun, Region, Version, attempt_of};
use super::native::Mark;
use super::output::Terminal;
use super::paint::{Paint, Style};
use super::text::{Reporter, guard_kind, kind, number, percent, plural};
use dynasour_runtime::config::Tier;
use dynasour_runtime::observe::census::Guard;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Versions with a smaller share of their region's instructions are folded to one line (guess).
const COLD: f64 = 0.05;
/// Regions with a smaller share of all instructions in traces are summed up, if no parts are asked for (guess).
const COLD_REGION: f64 = 0.001;
/// Columns of a region's bar.
const BAR: usize = 10;

/// What of a region is on the page.
struct Limits {
    versions: usize,
    /// Lines of guest code.
    code: usize,
    guards: usize,
}

/// The hottest region, and the others. With them the page of three regions has some 50 lines.
const LIMITS: [Limits; 2] =
    [Limits { versions: 4, code: 10, guards: 2 }, Limits { versions: 2, code: 0, guards: 1 }];

/// A text of lines that fit.
pub struct Screen {
    /// What the output can show.
    pub terminal: Terminal,
    paint: Paint,
    out: String,
}

impl Screen {
    /// An empty text.
    pub fn new(terminal: Terminal, paint: Paint) -> Screen {
        Screen { terminal, paint, out: String::new() }
    }

    /// Adds a line of pieces, cut at the width of the output.
    pub fn line(&mut self, pieces: &[(Style, &str)]) {
        let mut left = self.terminal.width;
        for (style, text) in pieces {
            let cut = clipped(text, left);
            left -= cut.width().min(left);
            self.out += &self.paint.text(*style, &cut);
            if cut.len() < text.len() {
                break;
            }
        }
        self.out.push('\n');
    }

    /// Adds a sentence, in as many lines as it needs.
    fn sentence(&mut self, text: &str) {
        let mut line = String::new();
        for word in text.split(' ') {
            if !line.is_empty() && line.width() + 1 + word.width() > self.terminal.width {
                self.line(&[(Style::Plain, &std::mem::take(&mut line))]);
                line.push(' ');
            }
            line += if line.trim().is_empty() { "" } else { " " };
            line += word;
        }
        self.line(&[(Style::Plain, &line)]);
    }

    /// Adds a text as it is.
    fn whole(&mut self, text: &str) {
        self.out += text;
    }

    /// The text.
    pub fn finish(self) -> String {
        self.terminal.text(self.out)
    }
}

/// As much of a text as has `width` columns; if it is cut, an ellipsis says so.
fn clipped(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_string();
    }
    let mut out = String::new();
    // Three columns, because the ellipsis may be shown as three points.
    let mut left = width.saturating_sub(3);
    for c in text.chars() {
        let columns = c.width().unwrap_or(0);
        if columns > left {
            break;
        }
        left -= columns;
        out.push(c);
    }
    out + "…"
}

/// The whole text.
pub fn page(reporter: &Reporter<'_>, e: &Explanation, mut screen: Screen) -> String {
    header(&mut screen, reporter, e);
    if let Some(attempts) = &e.header.attempts {
        heads::table(&mut screen, attempts);
    }
    // What is cold fills no screen.
    let is_shown =
        |region: &&Region| !reporter.parts.is_empty() || region.head.share >= COLD_REGION;
    let mut regions: Vec<&Region> = e.regions.iter().filter(is_shown).collect();
    if regions.is_empty() {
        regions.extend(e.regions.first());
    }
    for (rank, region) in regions.iter().enumerate() {
        self::region(&mut screen, reporter, e, rank, region);
    }
    footer(&mut screen, reporter, e, &regions);
    screen.finish()
}

fn header(screen: &mut Screen, reporter: &Reporter<'_>, e: &Explanation) {
    let h = &e.header;
    let command: Vec<&str> =
        std::iter::once(&h.program).chain(&h.args).map(String::as_str).collect();
    let ended = match (h.status, h.signal) {
        (Some(0), _) => String::new(),
        (Some(status), _) => format!(", ended with status {status}"),
        (None, Some(signal)) => format!(", killed by signal {signal}"),
        (None, None) => String::new(),
    };
    let under = format!("--tier {}{ended}: ", h.tier);
    screen.line(&[(Style::Plain, &under), (Style::Title, &command.join(" "))]);
    if let Some(attempts) = &h.attempts {
        screen.sentence(&heads::sentence(attempts));
    }
    let samples = if reporter.is_direct() { " at samples" } else { "" };
    screen.sentence(&format!(
        "With counters, heads hot after {} executions{samples} and no races: {} in {}.",
        number(h.threshold.into()),
        plural(h.traces as u64, "trace"),
        plural(h.regions_in_all as u64, "region"),
    ));
    let exact = if h.exact { "" } else { " (approximately: several threads)" };
    screen.sentence(&format!(
        "Shares are of the {} guest instructions executed in them{exact}.",
        number(h.instructions)
    ));
}

/// Regions that are not listed, and which options show more.
fn footer(screen: &mut Screen, reporter: &Reporter<'_>, e: &Explanation, shown: &[&Region]) {
    let h = &e.header;
    screen.line(&[]);
    let share = |n: u64| 100.0 * n as f64 / h.instructions.max(1) as f64;
    let shown = |linker: bool| shown.iter().filter(move |r| r.head.is_linker == linker);
    if h.linker.traces > 0 && shown(true).count() == 0 {
        let text = format!(
            "ld.so: {}, {:.1} % (--ld-so shows them)",
            plural(h.linker.traces as u64, "trace"),
            share(h.linker.instructions)
        );
        screen.line(&[(Style::Note, &text)]);
    }
    let others = (h.regions_in_all - h.linker.regions).saturating_sub(shown(false).count());
    if others > 0 {
        let of_shown: u64 = shown(false).map(|r| r.head.instructions).sum();
        let rest = h.instructions.saturating_sub(h.linker.instructions + of_shown);
        let text = format!(
            "{}: {:.1} % (--top N, --show PART, --at NAME)",
            plural(others as u64, "more region"),
            share(rest)
        );
        screen.line(&[(Style::Note, &text)]);
    }
    if reporter.parts.is_empty() {
        let text = "--show path,guards,anchors,passes,ir,native: parts of each version; --full: all; \
                    --at NAME: one";
        screen.line(&[(Style::Note, text)]);
    }
}

fn region(
    screen: &mut Screen,
    reporter: &Reporter<'_>,
    e: &Explanation,
    rank: usize,
    region: &Region,
) {
    let head = &region.head;
    screen.line(&[]);
    let bar = screen.terminal.bar(head.share, BAR);
    screen.line(&[
        (Style::Title, &format!("#{} region {} at {:#x}  ", rank + 1, head.symbol, head.pc)),
        (Style::Count, &bar),
        (Style::Title, &format!(" {:.1} %", 100.0 * head.share)),
        (Style::Plain, &format!("  {} instructions", number(head.instructions))),
    ]);
    if let Some(in_run) = head.in_run {
        screen.line(&[(Style::Plain, &format!("   {}", in_run_words(in_run, e, region)))]);
    }
    let limits = &LIMITS[rank.min(LIMITS.len() - 1)];
    let mut versions: Vec<&Version> = region.versions.iter().collect();
    let mut cold = Vec::new();
    if !reporter.unfolded {
        // Those that were asked for come first.
        versions.sort_by(|a, b| {
            (b.body.is_some().cmp(&a.body.is_some())).then(b.share.total_cmp(&a.share))
        });
        let most = if reporter.parts.is_empty() { limits.versions } else { versions.len() };
        let is_hot = |v: &&&Version| v.share >= COLD || v.body.is_some();
        let hot = versions.iter().take_while(is_hot).count().clamp(1.min(versions.len()), most);
        cold = versions.split_off(hot);
    }
    for version in &versions {
        brief(screen, reporter, version, head.pc);
    }
    if !cold.is_empty() {
        let share = 100.0 * cold.iter().map(|v| v.share).sum::<f64>();
        let what = plural(cold.len() as u64, "colder version");
        screen.line(&[(Style::Note, &format!("   and {what}: {share:.1} % of the region"))]);
    }
    if reporter.parts.is_empty() {
        let hottest = versions.iter().find_map(|v| v.body.as_ref().map(|body| (*v, body)));
        if let Some((version, body)) = hottest {
            excerpt(screen, body, limits.code);
            failing(screen, reporter, body, limits.guards);
            cost(screen, version);
        }
        return;
    }
    for version in region.versions.iter().filter(|v| v.body.is_some()) {
        let mut text = String::new();
        reporter.version(&mut text, version);
        screen.whole(&text);
    }
    let hidden = region.versions.iter().filter(|v| v.body.is_none()).count();
    if hidden > 0 {
        let what = plural(hidden as u64, "version");
        screen.line(&[]);
        screen.line(&[(Style::Note, &format!("  {what} not shown whole; --at NAME shows one"))]);
    }
}

fn in_run_words(in_run: InRun, e: &Explanation, region: &Region) -> String {
    let attempts = e.header.attempts.as_deref().unwrap_or_default();
    let head = attempt_of(&region.head, attempts);
    let why = head.map_or(String::new(), heads::verdict);
    match in_run {
        InRun::NotTried => "in `run`: not tried, it is not hot enough there".to_string(),
        InRun::Refused => format!("in `run`: no trace, {}", why.trim_start_matches("none: ")),
        InRun::Kept | InRun::Slower => format!("in `run`: {why}"),
    }
}

/// The line of a version in its region's list.
fn brief(screen: &mut Screen, reporter: &Reporter<'_>, v: &Version, region: u64) {
    let from = v.from.as_ref().map_or(String::new(), |from| {
        let guards: Vec<String> = from.guards.iter().map(|g| format!("g{g}")).collect();
        format!(" of {} {}", reporter.fragment(from.fragment), guards.join(", "))
    });
    let at = if v.pc == region { String::new() } else { format!(" at {}", v.symbol) };
    let loops = v.iterations.map_or(String::new(), |n| format!(", {} iterations", number(n)));
    let text = format!(
        "{:>6.1} %  {}{from}{at}: entered {}{loops}, {}",
        100.0 * v.share,
        kind(v.kind),
        number(v.entered),
        plural(v.failed, "failure"),
    );
    screen.line(&[(Style::Symbol, &format!("   {:<5}", v.name)), (Style::Plain, &text)]);
}

/// The hottest guest code of a version: `lines` instructions from the first block on that is executed as
/// often as any.
fn excerpt(screen: &mut Screen, body: &Body, lines: usize) {
    let Some(most) = body.path.iter().map(|block| block.executed).max().filter(|_| lines > 0)
    else {
        return;
    };
    // Counts of one loop differ a little, by the failures in it.
    let is_hot = |block: &Block| block.executed >= most - most / 100;
    let start = body.path.iter().position(is_hot).unwrap_or(0);
    let before: usize = body.path[..start].iter().map(|block| block.instructions.len()).sum();
    if before > 0 {
        let what = plural(before as u64, "instruction");
        screen.line(&[(Style::Note, &format!("      … {what} before"))]);
    }
    let mut shown = 0;
    for block in &body.path[start..] {
        for (n, inst) in block.instructions.iter().enumerate() {
            if shown == lines {
                break;
            }
            shown += 1;
            let times = if n == 0 { number(block.executed) } else { String::new() };
            let place = if n == 0 { block.symbol.as_str() } else { "" };
            let note = inst.note.as_ref().map_or(String::new(), |note| format!("  ; {note}"));
            let failing = |g: &&Guard| g.failed > 0;
            let guards = inst.guards.iter().filter_map(|g| body.guards.get(*g as usize));
            let guards: Vec<String> = guards
                .filter(failing)
                .map(|g| format!("g{} fails {}", g.index, percent(g.failed, g.executed)))
                .collect();
            let guards = match guards.is_empty() {
                true => String::new(),
                false => format!("  <- {}", guards.join(", ")),
            };
            let place: String = place.chars().take(22).collect();
            screen.line(&[
                (Style::Count, &format!("  {times:>14} ")),
                (Style::Symbol, &format!("{place:<22} ")),
                (Style::Plain, &inst.text),
                (Style::Note, &note),
                (Style::Guard, &guards),
            ]);
        }
    }
    let all: usize = body.path.iter().map(|block| block.instructions.len()).sum();
    if all > before + shown {
        let what = plural((all - before - shown) as u64, "more instruction");
        screen.line(&[(Style::Note, &format!("      … {what} (--show path)"))]);
    }
}

/// The guards that fail most.
fn failing(screen: &mut Screen, reporter: &Reporter<'_>, body: &Body, most: usize) {
    let mut guards: Vec<&Guard> = body.guards.iter().filter(|g| g.failed > 0).collect();
    guards.sort_by_key(|g| std::cmp::Reverse(g.failed));
    for g in guards.iter().take(most) {
        let (path, exit) = bytes(body, g.index);
        let place: String = reporter.symbols.name(g.pc).chars().take(20).collect();
        let text = format!(
            " {} at {place}: failed {} of {} ({}); {path} + {exit} B{}",
            guard_kind(g.kind),
            number(g.failed),
            number(g.executed),
            percent(g.failed, g.executed),
            reporter
                .went(&g.went)
                .replace("the interpreter", "interpreter")
                .replace("the copied ", "")
        );
        screen.line(&[(Style::Guard, &format!("   g{}", g.index)), (Style::Plain, &text)]);
        screen.line(&[(Style::Note, &format!("      assumes {}", g.english))]);
    }
    let never = body.guards.len() - guards.len();
    let counts = [(guards.len().saturating_sub(most), "failing"), (never, "never failed")];
    let others: Vec<String> = (counts.iter().filter(|(n, _)| *n > 0))
        .map(|(n, what)| format!("{} {what}", number(*n as u64)))
        .collect();
    if !others.is_empty() {
        let text = format!("   other guards: {} (--show guards)", others.join(", "));
        screen.line(&[(Style::Note, &text)]);
    }
}

/// Bytes of native code of a guard: its jumps on the path, and its exit.
fn bytes(body: &Body, guard: u32) -> (usize, usize) {
    let (mut path, mut exit) = (0, 0);
    // Guards that leave by one exit have their marks on its first instruction.
    let mut current: Vec<u32> = Vec::new();
    for line in &body.native {
        let begun = line.marks.iter().filter_map(|mark| match mark {
            Mark::Exit { guard } => Some(*guard),
            _ => None,
        });
        let begun: Vec<u32> = begun.collect();
        if !begun.is_empty() {
            current = begun;
        }
        let size = line.bytes.len() / 2;
        if line.cold && current.contains(&guard) {
            exit += size;
        }
        if !line.cold && line.marks.contains(&Mark::Guard { guard }) {
            path += size;
        }
    }
    (path, exit)
}

/// What the version costs.
fn cost(screen: &mut Screen, v: &Version) {
    let guards = v.body.as_ref().map_or(0, |body| body.guards.len());
    let text = format!(
        "   costs: {} in {} instructions; {} + {} bytes with counters; {:.1} ms to compile",
        plural(guards as u64, "check"),
        number(v.guest_instructions),
        number(v.code_bytes.hot),
        number(v.code_bytes.cold),
        v.compile_ns.compiling() as f64 / 1e6
    );
    screen.line(&[(Style::Note, &text)]);
}

/// The report for a program without traces.
pub fn without_traces(e: &Explanation) -> String {
    let h = &e.header;
    let (at_samples, remedy) = match h.tier == Tier::Direct.to_string() {
        true => (" at its samples", "A longer run or a lower --threshold helps"),
        false => ("", "A lower --threshold makes traces earlier"),
    };
    format!(
        "{} never got hot: no loop or function of it was executed {} times{at_samples}, so no trace \
         was made.\n{remedy}; a program that executes others is explained as the last of them.\n",
        h.program,
        number(h.threshold.into())
    )
}

#[cfg(test)]
mod tests {
    use super::super::paint::When;
    use super::*;

    #[test]
    fn lines_are_cut_at_the_width() {
        assert_eq!(clipped("abcdefgh", 8), "abcdefgh");
        assert_eq!(clipped("abcdefgh", 7), "abcd…");
        assert_eq!(clipped("日本語日本語", 9), "日本語…");
        let terminal = Terminal { width: 10, height: None, is_unicode: false };
        let mut screen = Screen::new(terminal, Paint::new(When::Never, true));
        screen.line(&[(Style::Plain, "0123456"), (Style::Guard, "789abc"), (Style::Note, "x")]);
        screen.sentence("one two three");
        assert_eq!(screen.finish(), "0123456...\none two\n three\n");
    }
}
