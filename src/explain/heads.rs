//! The table of heads: where `run` tries traces, how hot that is, and what becomes of the traces.
//!
//! No data, no lock. The list is that of `run --stats-json` ([`dynasour_runtime::observe::attempts`]).
//!
//! ```text
//!   work+0x28                █████▋  94.2 %     1  stays: 6.04 ns, before 11.31 ± 0.60 (6 rounds)
//! ```

use super::model::{InRun, outcome};
use super::paint::Style;
use super::screen::Screen;
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::stats::{RaceResult, RaceVerdict};

/// Heads that are listed; the others are summed up (guess: what is hot fits).
const SHOWN: usize = 6;
/// Columns of a symbol.
const NAME: usize = 24;
/// Columns of a bar.
const BAR: usize = 6;

/// What `run` does with a program, in one sentence.
pub fn sentence(heads: &[Attempt]) -> String {
    if heads.is_empty() {
        return "`run` tries no trace: nothing gets hot there.".to_string();
    }
    let number = |of: InRun| heads.iter().filter(|head| outcome(head) == of).count();
    let (kept, slower) = (number(InRun::Kept), number(InRun::Slower));
    let some = |n: usize, what: &str| match n {
        0 => String::new(),
        _ => format!(", {what} at {n}"),
    };
    format!(
        "`run` tries traces at {} and keeps those at {kept}{}{}.",
        match heads.len() {
            1 => "1 head".to_string(),
            n => format!("{n} heads"),
        },
        some(slower, "drops slower ones"),
        some(heads.len() - kept - slower, "makes none")
    )
}

/// Percent of the time that is spent in a head's traces and, outside of traces, in its function. None
/// if nothing was sampled, or the head has no trace and there are no symbols to know its function by.
fn heat(head: &Attempt) -> Option<f64> {
    match (head.in_traces.filter(|share| *share > 0.0), head.in_function) {
        (None, None) => None,
        (traces, function) => Some(traces.unwrap_or(0.0) + function.unwrap_or(0.0)),
    }
}

/// Prints the table.
pub fn table(screen: &mut Screen, heads: &[Attempt]) {
    if heads.is_empty() {
        return;
    }
    screen.line(&[]);
    let title = format!(
        "  {:<NAME$} {:<BAR$} {:>7} {:>5}  {}",
        "heads in `run`", "", "time", "tries", "what becomes of the trace (ns an iteration)"
    );
    screen.line(&[(Style::Heading, &title)]);
    let (of_linker, own): (Vec<&Attempt>, Vec<&Attempt>) =
        heads.iter().partition(|head| head.in_linker);
    for head in own.iter().take(SHOWN) {
        let heat = heat(head);
        let name: String = head.symbol.chars().take(NAME).collect();
        let share = heat.map_or("-".to_string(), |heat| format!("{heat:.1} %"));
        let bar = screen.terminal.bar(heat.unwrap_or(0.0) / 100.0, BAR);
        let style = match outcome(head) {
            InRun::Kept => Style::New,
            InRun::Slower => Style::Gone,
            InRun::Refused | InRun::NotTried => Style::Note,
        };
        screen.line(&[
            (Style::Symbol, &format!("  {name:<NAME$} ")),
            (Style::Count, &bar),
            (Style::Plain, &format!(" {share:>7} {:>5}  ", head.tries)),
            (style, &verdict(head)),
        ]);
    }
    let rest: Vec<&Attempt> = own.iter().skip(SHOWN).copied().collect();
    for (what, of) in [("more", rest), ("of ld.so", of_linker)] {
        if !of.is_empty() {
            let kept = of.iter().filter(|head| outcome(head) == InRun::Kept).count();
            let text = format!("  and {} {what}, of which {kept} stay", of.len());
            screen.line(&[(Style::Note, &text)]);
        }
    }
}

/// What became of the trace of a head, and why.
pub fn verdict(head: &Attempt) -> String {
    match head.race {
        Some(race) => raced(&race),
        None => match head.outcome.strip_prefix("refused: ") {
            Some(reason) => format!("none: {}", refusal(reason)),
            None => "stays".to_string(),
        },
    }
}

fn raced(race: &RaceResult) -> String {
    let [trace, floor, error] = [race.trace, race.floor, race.error].map(|t| t as f64 / 1000.0);
    let figures = format!("{trace:.2} ns, before {floor:.2} ± {error:.2} ({} rounds)", race.rounds);
    match race.verdict {
        RaceVerdict::Trace => format!("stays: {figures}"),
        RaceVerdict::Floor => format!("dropped: {figures}"),
        RaceVerdict::Cold => "stays, not judged: the guest went elsewhere".to_string(),
    }
}

/// The name of an `AbortReason` of the tracer in words; a reason without words stands as it
/// is.
fn refusal(reason: &str) -> &str {
    match reason {
        "NothingToTrace" => "the runtime must execute its first instruction",
        "Fault" => "an instruction faulted while it was recorded",
        "Signal" => "a signal arrived while it was recorded",
        "UnsupportedLocation" => "it uses a segment base",
        "NoAnchor" => "an instruction cannot be repeated",
        "Vdso" => "it is in the vDSO",
        "X87InPlace" => "x87 code in place would see it",
        "TooDear" => "compiling it would take too long now",
        "WritableCode" => "plain stores may change the code",
        "Emitter" => "the emitter refused it",
        "Flushed" => "the code cache was flushed meanwhile",
        "TooManyVersions" => "the region has enough versions",
        "NotSelected" => "excluded by --only-trace",
        "NoGain" => "it would gain less than it costs",
        "LeavesEarly" => "the guest leaves the path too often",
        "NoGuestLoop" => "no loop of an interpreted program",
        "Inconsistent" => "the values do not fit the path",
        "Refuted" => "it was shown to be wrong",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(outcome: &str) -> Attempt {
        Attempt {
            pc: 0x1000,
            symbol: "work".to_string(),
            tries: 1,
            in_linker: false,
            in_traces: Some(40.0),
            in_function: None,
            outcome: outcome.to_string(),
            race: None,
        }
    }

    #[test]
    fn what_run_does_is_said_in_a_sentence() {
        assert!(sentence(&[]).contains("nothing gets hot"));
        let heads = [head("made"), head("floor"), head("refused: NoGain")];
        assert_eq!(
            sentence(&heads),
            "`run` tries traces at 3 heads and keeps those at 1, drops slower ones at 1, makes none \
             at 1."
        );
        assert_eq!(verdict(&heads[2]), "none: it would gain less than it costs");
        let unknown = Attempt { in_traces: Some(0.0), ..heads[2].clone() };
        assert_eq!(heat(&unknown), None, "nobody knows its function");
        assert_eq!((verdict(&heads[0]).as_str(), heat(&heads[0])), ("stays", Some(40.0)));
    }
}
