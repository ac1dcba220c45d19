//! The parts of a version as text: the recorded path, guards, anchors, passes, IR and native code.
//!
//! A [`Reporter`] prints a [`Version`], which has all numbers already; this module only formats
//! them. Exits that were never taken are folded to one line, unless [`Reporter::unfolded`]. No data, no lock.
//!
//! Example: `--show guards` prints the table of guards of each version that has a [`Body`].

use super::guest::Block;
use super::model::{Body, Version};
use super::native::{Line, Mark};
use super::paint::{Paint, Style};
use super::passes::{Edit, difference};
use dynasour_guest::symbols::Symbols;
use dynasour_runtime::config::Tier;
use dynasour_runtime::observe::census::{
    Anchor, Census, Entrance, Guard, GuardKind, Interpreted, Kind, To, Went,
};
use std::fmt::Write;

/// Lines of unchanged IR shown around a change (guess).
const CONTEXT_LINES: usize = 2;

/// Which parts of a version are shown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Part {
    /// The recorded path in guest instructions
    Path,
    /// The guards: what they check, how often they failed, where that went
    Guards,
    /// What each anchor restores
    Anchors,
    /// What each pass of the optimiser changed
    Passes,
    /// The IR as built and as emitted
    Ir,
    /// The native code
    Native,
    /// All of these
    All,
}

impl Part {
    /// All parts, in the order in which they are shown.
    pub const EACH: [Part; 6] =
        [Part::Path, Part::Guards, Part::Anchors, Part::Passes, Part::Ir, Part::Native];
}

/// Writes the parts of versions.
pub struct Reporter<'a> {
    /// Colours.
    pub paint: Paint,
    /// Gives names to fragments.
    pub census: &'a Census,
    /// Give names to addresses.
    pub symbols: &'a Symbols,
    /// The parts to show.
    pub parts: &'a [Part],
    /// Is everything shown, also what is cold?
    pub unfolded: bool,
}

/// A number with separators: 1,234,567.
pub fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// The share of failures in executions; `-` if there were no executions.
pub fn percent(part: u64, of: u64) -> String {
    match (part, of) {
        (_, 0) => "-".to_string(),
        (0, _) => "never".to_string(),
        _ => {
            let share = 100.0 * part as f64 / of as f64;
            if share < 0.1 { format!("{share:.3} %") } else { format!("{share:.1} %") }
        }
    }
}

pub fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Loop => "loop",
        Kind::Linear => "linear trace",
        Kind::Side => "side trace",
        Kind::SideLoop => "loop of an exit",
        Kind::Stub => "stub",
    }
}

pub fn guard_kind(kind: GuardKind) -> &'static str {
    match kind {
        GuardKind::Branch => "branch",
        GuardKind::Target => "target",
        GuardKind::Return => "return",
        GuardKind::Memory => "memory",
        GuardKind::Context => "context",
        GuardKind::Value => "value",
        GuardKind::Alias => "alias",
        GuardKind::Code => "code",
        GuardKind::Mixed => "mixed",
    }
}

/// Which loop of an interpreted program a version is. The values that it assumes beside the key are
/// among its guards.
fn loop_of_program(interpreted: &Interpreted) -> String {
    let mut key: Vec<String> =
        interpreted.registers.iter().map(|(name, value)| format!("{name} = {value:#x}")).collect();
    let in_registers: Vec<u64> = interpreted.registers.iter().map(|(_, value)| *value).collect();
    let in_memory = interpreted.key.iter().filter(|value| !in_registers.contains(value));
    key.extend(in_memory.map(|value| format!("{value:#x} in memory")));
    let by_position = if interpreted.is_by_position { "; told by positions alone" } else { "" };
    let operands = if interpreted.assumes_operands { "; its operands are assumed" } else { "" };
    format!("a loop of the interpreted program, where {}{by_position}{operands}", key.join(", "))
}

/// What a version knows and needs where it is entered, and how often it was refused there.
fn entrance(v: &Version) -> Vec<String> {
    let Entrance { known, needs, needs_more, refused, order } = &v.entrance;
    let mut lines = Vec::new();
    if !known.is_empty() {
        lines.push(format!("its exit knows: {}", known.join(" && ")));
    }
    let order = order.map_or(String::new(), |n| format!("number {n} in its region; "));
    let needs = match (needs.join(" && "), needs_more) {
        (facts, false) if facts.is_empty() => facts,
        (facts, true) if facts.is_empty() => "needs more than registers tell; ".to_string(),
        (facts, false) => format!("needs {facts}; "),
        (facts, true) => format!("needs {facts}, and more; "),
    };
    if !order.is_empty() || !needs.is_empty() {
        let share = 100.0 * (v.entered - refused.min(&v.entered)) as f64 / v.entered.max(1) as f64;
        let entered = number(v.entered);
        lines.push(format!("{order}{needs}{share:.1} % of {entered} entries passed its entry"));
    }
    lines
}

impl Reporter<'_> {
    /// Did the program run in place? Then code that is no trace is the guest's own.
    pub fn is_direct(&self) -> bool {
        self.census.tier == Tier::Direct.to_string()
    }

    /// The name of a fragment in reports: stubs have a number only.
    pub fn fragment(&self, id: u32) -> String {
        match self.census.fragments.get(id as usize) {
            Some(f) if f.kind == Kind::Stub => format!("stub {id}"),
            Some(f) => f.name.clone(),
            None => format!("fragment {id}"),
        }
    }

    /// The details of a version, if it has them.
    pub fn version(&self, out: &mut String, v: &Version) {
        let Some(body) = &v.body else { return };
        let p = &self.paint;
        let _ = writeln!(
            out,
            "\n{}",
            p.text(
                Style::Title,
                &format!("  {} ({}) at {} {:#x}", v.name, kind(v.kind), v.symbol, v.pc)
            )
        );
        let t = v.compile_ns;
        let _ = writeln!(
            out,
            "  {} guest instructions -> {} + {} bytes of code (with counters), {}, {}; recorded in \
             {}, built in {}, optimised in {}, emitted in {}{}",
            v.guest_instructions,
            v.code_bytes.hot,
            v.code_bytes.cold,
            plural(v.spill_slots.into(), "spill slot"),
            plural(v.moves.into(), "allocator's move"),
            micros(t.record),
            micros(t.build),
            micros(t.optimise),
            micros(t.emit),
            if v.dropped { "; dropped before the end of the run" } else { "" }
        );
        for (what, certificate) in ["version", "code"].iter().zip(&v.certificates) {
            if let Some(certificate) = certificate {
                let _ = writeln!(out, "  {what} {certificate}");
            }
        }
        for (what, proof) in ["version", "code"].iter().zip(&v.proofs) {
            if let Some(proof) = proof {
                let _ = writeln!(out, "  {what} {proof}");
            }
        }
        if let Some(interpreted) = &v.interpreted {
            let _ = writeln!(out, "  {}", loop_of_program(interpreted));
        }
        for line in entrance(v) {
            let _ = writeln!(out, "  {line}");
        }
        for end in &v.ends {
            let to = end
                .target
                .map_or("wherever an indirect jump goes".to_string(), |t| self.address(t));
            let _ = writeln!(
                out,
                "  its path ended {} times, at {to}{}",
                number(end.executed),
                self.went(&end.went)
            );
        }
        if v.polls + v.faults > 0 {
            let _ = writeln!(
                out,
                "  left {} times for a signal, {} times by a fault",
                v.polls, v.faults
            );
        }
        for part in self.parts {
            match part {
                Part::Path => self.path(out, v, body),
                Part::Guards => self.guards(out, body),
                Part::Anchors => self.anchors(out, body),
                Part::Passes => self.passes(out, body),
                Part::Ir => self.ir(out, body),
                Part::Native => self.native(out, body),
                // It stands for the others on the command line only.
                Part::All => {}
            }
        }
    }

    fn heading(&self, out: &mut String, text: &str) {
        let _ = writeln!(out, "\n  {}", self.paint.text(Style::Heading, text));
    }

    /// A pc with its symbol.
    fn address(&self, pc: u64) -> String {
        format!("{} {pc:#x}", self.symbols.name(pc))
    }

    /// Where exits went, the most frequent destination first.
    pub fn went(&self, went: &[Went]) -> String {
        if went.is_empty() {
            return String::new();
        }
        let mut went = went.to_vec();
        went.sort_by_key(|w| std::cmp::Reverse(w.times));
        let to = |w: &Went| {
            let to = match w.to {
                To::Runtime => "the interpreter".to_string(),
                To::Fragment { fragment } => self.fragment(fragment),
                To::Block { pc } if self.is_direct() => format!("guest code at {pc:#x}"),
                To::Block { pc } => format!("the copied block {pc:#x}"),
            };
            format!("{to} {}", number(w.times))
        };
        format!(" -> {}", went.iter().map(to).collect::<Vec<_>>().join(", "))
    }

    fn path(&self, out: &mut String, v: &Version, body: &Body) {
        self.heading(out, "recorded path");
        let mut function = String::new();
        for block in &body.path {
            self.block(out, block, body, &mut function);
        }
        match v.kind {
            Kind::Loop | Kind::SideLoop => {
                let _ = writeln!(out, "      back to {:#x}", v.pc);
            }
            Kind::Linear | Kind::Side | Kind::Stub => {
                if let Some(last) = body.path.last() {
                    let _ = writeln!(out, "      ends, on to {}", self.address(last.next));
                }
            }
        }
    }

    fn block(&self, out: &mut String, block: &Block, body: &Body, function: &mut String) {
        let p = &self.paint;
        let name = self.symbols.at(block.pc).map_or(block.symbol.clone(), |s| s.name.clone());
        if name != *function {
            let _ = writeln!(out, "    {}", p.text(Style::Symbol, &format!("{name}:")));
            *function = name;
        }
        for (n, inst) in block.instructions.iter().enumerate() {
            let times = if n == 0 { number(block.executed) } else { String::new() };
            let note = inst.note.as_ref().map_or(String::new(), |note| format!("  ; {note}"));
            let _ = writeln!(
                out,
                "    {} {:>10x}  {}{}",
                p.text(Style::Count, &format!("{times:>14}")),
                inst.pc,
                inst.text,
                p.text(Style::Note, &note)
            );
            for guard in inst.guards.iter().filter_map(|g| body.guards.get(*g as usize)) {
                let _ = writeln!(
                    out,
                    "    {:>14} {:>10}  {}",
                    "",
                    "",
                    p.text(Style::Guard, &self.line_of(guard, inst.pc))
                );
            }
        }
    }

    /// The line below the instruction that a guard checks.
    fn line_of(&self, g: &Guard, pc: u64) -> String {
        if pc != g.pc {
            return format!("g{}, see {:#x}", g.index, g.pc);
        }
        let position = if g.in_loop { "" } else { ", before the loop" };
        let position =
            if g.position.0 == 0 && !g.in_loop && self.is_linear(g) { "" } else { position };
        format!(
            "g{} assumes {}: checked {}, failed {} ({}){}{position}",
            g.index,
            g.english,
            number(g.executed),
            number(g.failed),
            percent(g.failed, g.executed),
            self.went(&g.went)
        )
    }

    /// Does the guard belong to a trace without a loop?
    fn is_linear(&self, guard: &Guard) -> bool {
        let of = |f: &&dynasour_runtime::observe::census::Fragment| {
            f.guards.iter().any(|g| g.host == guard.host && g == guard)
        };
        self.census.fragments.iter().find(of).is_none_or(|f| f.iterations.is_none())
    }

    fn guards(&self, out: &mut String, body: &Body) {
        if body.guards.is_empty() {
            self.heading(out, "no guards");
            return;
        }
        self.heading(out, "guards");
        let p = &self.paint;
        let _ = writeln!(
            out,
            "    {:<4} {:<7} {:>14} {:>14} {:>9}  predicate",
            "", "kind", "checked", "failed", ""
        );
        let (shown, never): (Vec<&Guard>, Vec<&Guard>) =
            body.guards.iter().partition(|g| self.unfolded || g.failed > 0);
        for g in shown {
            let style = if g.failed > 0 { Style::Guard } else { Style::Plain };
            let row = format!(
                "    g{:<3} {:<7} {:>14} {:>14} {:>9}  {}",
                g.index,
                guard_kind(g.kind),
                number(g.executed),
                number(g.failed),
                percent(g.failed, g.executed),
                g.english
            );
            let _ = writeln!(out, "{}", p.text(style, &row));
            let about = format!("      {} -> falls back to {}", self.address(g.pc), g.anchor.name);
            let _ = writeln!(
                out,
                "{}",
                p.text(Style::Note, &format!("{about}{}", self.failures_went(g)))
            );
        }
        if !never.is_empty() {
            let names: Vec<String> =
                never.iter().take(8).map(|g| format!("g{}", g.index)).collect();
            let more = if never.len() > names.len() { ", …" } else { "" };
            let checks = never.iter().map(|g| g.executed).sum();
            let text = format!(
                "    {} never failed in {} checks: {}{more} (--full shows them)",
                plural(never.len() as u64, "guard"),
                number(checks),
                names.join(", ")
            );
            let _ = writeln!(out, "{}", p.text(Style::Note, &text));
        }
    }

    fn failures_went(&self, g: &Guard) -> String {
        if g.went.is_empty() {
            String::new()
        } else {
            format!("; failures went{}", self.went(&g.went))
        }
    }

    fn anchors(&self, out: &mut String, body: &Body) {
        let mut shown: Vec<&str> = Vec::new();
        for g in &body.guards {
            if shown.contains(&g.anchor.name.as_str()) {
                continue;
            }
            if shown.is_empty() {
                self.heading(out, "anchors: what the guest's state is when a guard fails");
            }
            shown.push(&g.anchor.name);
            let of = body.guards.iter().filter(|o| o.anchor.name == g.anchor.name);
            let of: Vec<String> = of.map(|o| format!("g{}", o.index)).collect();
            let target = g.anchor.target.map_or("a computed pc".to_string(), |t| self.address(t));
            let title = format!("    {} of {}: on to {target}", g.anchor.name, of.join(", "));
            let _ = writeln!(out, "{}", self.paint.text(Style::Symbol, &title));
            for line in varmap_lines(&g.anchor) {
                let _ = writeln!(out, "      {line}");
            }
        }
    }

    fn passes(&self, out: &mut String, body: &Body) {
        if body.passes.is_empty() {
            self.heading(
                out,
                "passes: not repeated here (the run used another pipeline, or nothing changed)",
            );
            return;
        }
        let p = &self.paint;
        for change in &body.passes {
            self.heading(out, &format!("changed by {}", change.pass));
            let edits = difference(&change.before, &change.after);
            let changed: Vec<usize> =
                (0..edits.len()).filter(|n| !matches!(edits[*n], Edit::Same(_))).collect();
            let mut last = None;
            for (n, edit) in edits.iter().enumerate() {
                let next = changed.partition_point(|c| *c < n);
                let near = changed.get(next).is_some_and(|c| c - n <= CONTEXT_LINES)
                    || next > 0 && n - changed[next - 1] <= CONTEXT_LINES;
                if !near {
                    continue;
                }
                if last.is_some_and(|last| last + 1 != n) {
                    let _ = writeln!(out, "    ...");
                }
                last = Some(n);
                let _ = match edit {
                    Edit::Same(line) => writeln!(out, "     {line}"),
                    Edit::Gone(line) => {
                        writeln!(out, "    {}", p.text(Style::Gone, &format!("-{line}")))
                    }
                    Edit::New(line) => {
                        writeln!(out, "    {}", p.text(Style::New, &format!("+{line}")))
                    }
                };
            }
        }
    }

    fn ir(&self, out: &mut String, body: &Body) {
        for (title, text) in [("IR as built", &body.built), ("IR as emitted", &body.optimised)] {
            self.heading(out, title);
            for line in text.lines() {
                let _ = writeln!(out, "    {line}");
            }
        }
    }

    fn native(&self, out: &mut String, body: &Body) {
        self.heading(out, "native code");
        let mut cold = false;
        // Is the exit to which the lines belong shown?
        let mut is_taken = true;
        let (mut folded, mut bytes) = (0, 0);
        for line in &body.native {
            if line.cold && !cold {
                self.heading(out, "native code of exits");
                cold = true;
            }
            let of_line = line.marks.iter().filter_map(|mark| match mark {
                Mark::Exit { guard } => body.guards.get(*guard as usize),
                _ => None,
            });
            let of_line: Vec<&Guard> = of_line.collect();
            if !of_line.is_empty() {
                is_taken = self.unfolded || of_line.iter().any(|guard| guard.failed > 0);
                folded += u64::from(!is_taken);
            }
            match is_taken {
                true => self.native_line(out, line),
                false => bytes += line.bytes.len() as u64 / 2,
            }
        }
        if folded > 0 {
            let what = plural(folded, "exit");
            let text =
                format!("    {what} never taken, {} bytes (--full shows them)", number(bytes));
            let _ = writeln!(out, "{}", self.paint.text(Style::Note, &text));
        }
    }

    fn native_line(&self, out: &mut String, line: &Line) {
        let p = &self.paint;
        for mark in &line.marks {
            match mark {
                Mark::LoopHead => {
                    let _ = writeln!(out, "    {}", p.text(Style::Symbol, "loop:"));
                }
                Mark::Exit { guard } => {
                    let _ =
                        writeln!(out, "    {}", p.text(Style::Guard, &format!("g{guard} failed:")));
                }
                Mark::Guard { .. }
                | Mark::Spill { .. }
                | Mark::Reload { .. }
                | Mark::Context { .. }
                | Mark::Leaves { .. } => {}
            }
        }
        let notes: Vec<String> = line.marks.iter().filter_map(note).collect();
        let guard = line.marks.iter().any(|m| matches!(m, Mark::Guard { .. }));
        let text = format!("{:>10x}  {}", line.at, line.text);
        let text = if guard { p.text(Style::Guard, &text) } else { text };
        let note =
            if notes.is_empty() { String::new() } else { format!("  ; {}", notes.join(", ")) };
        let _ = writeln!(out, "    {text}{}", p.text(Style::Note, &note));
    }
}

fn note(mark: &Mark) -> Option<String> {
    match mark {
        Mark::Guard { guard } => Some(format!("guard g{guard}")),
        Mark::Spill { slot } => Some(format!("spilled to slot {slot}")),
        Mark::Reload { slot } => Some(format!("from slot {slot}")),
        Mark::Context { field } => Some(field.to_string()),
        Mark::Leaves { to } => Some(format!("leaves for {to}")),
        Mark::LoopHead | Mark::Exit { .. } => None,
    }
}

/// An anchor's varmap as text; unchanged locations are listed together.
fn varmap_lines(anchor: &Anchor) -> Vec<String> {
    let (mut entry, mut head, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    for line in &anchor.english {
        match line.split_once(" = ") {
            Some((loc, value)) if value == format!("{loc}@entry") => entry.push(loc),
            Some((loc, value)) if value == format!("{loc}@loop") => head.push(loc),
            _ => lines.push(line.clone()),
        }
    }
    for (same, since) in [(head, "the loop's head"), (entry, "the entry")] {
        if !same.is_empty() {
            lines.push(format!("as at {since}: {}", same.join(", ")));
        }
    }
    lines.push("everything else is in place".to_string());
    lines
}

pub fn plural(n: u64, what: &str) -> String {
    match n {
        1 => format!("1 {what}"),
        _ => format!("{} {what}s", number(n)),
    }
}

fn micros(ns: u64) -> String {
    format!("{:.0} µs", ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(
            [number(0), number(999), number(1_000), number(1_234_567)],
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [percent(0, 5), percent(1, 2), percent(1, 100_000)],
            ["never", "50.0 %", "0.001 %"]
        );
        assert_eq!(percent(0, 0), "-");
    }

    #[test]
    fn anchors_gather_what_has_not_changed() {
        let anchor = Anchor {
            name: "a1".into(),
            target: Some(1),
            text: String::new(),
            english: ["rax = rax@entry", "rcx = rcx@loop + 1", "rdx = rdx@loop", "rbx = rbx@entry"]
                .map(str::to_string)
                .to_vec(),
            stores: 0,
        };
        let lines = varmap_lines(&anchor);
        assert_eq!(
            lines[..3],
            ["rcx = rcx@loop + 1", "as at the loop's head: rdx", "as at the entry: rax, rbx"]
        );
    }
}
