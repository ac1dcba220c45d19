//! The results of a comparison of policies as text: what differs first, then tables.
//!
//! [`Report::table`] makes all of it. What is significant is coloured: a time whose 95 % interval does
//! not hold the 1 is green if it is shorter than with `default`, red if it is longer. No data; no lock.
//!
//! ```text
//! merged executes 21 % fewer guards than default, in the same time (0.99-1.02)
//! eager takes 28 % longer than default (1.26-1.30)
//! ```

use crate::bench::summary::{FEWEST_FOR_INTERVAL, Ratio};
use crate::explain::paint::{Paint, Style};
use crate::guards::counterfactual::BASE;
use crate::guards::report::{Report, Row, short};
use crate::guards::table::{Cell, heading, table};
use dynasour_runtime::config::placement;
use std::collections::BTreeSet;

/// In the table, the cost of a deoptimisation that noise can explain.
const NOT_DETERMINED: &str = "n.d.";
/// Differences in guards executed that are worth a line: from two percent on (guess).
const WORTH_A_LINE: f64 = 0.02;
/// Characters of a symbol in the table of sites (guess: with usual addresses the table has 100 columns).
const SYMBOL: usize = 16;
/// Significant differences in time that are worth a line: from one percent on (guess: less is the layout of
/// the code, not the placement).
const WORTH_A_LINE_OF_TIME: f64 = 0.01;
/// The most lines about differences (guess: the largest ones; the tables have all).
const LINES: usize = 4;

impl Report {
    /// The kinds of guards that any policy has.
    fn kinds(&self) -> BTreeSet<&str> {
        self.policies.iter().flat_map(|row| row.counts.kinds.keys().map(String::as_str)).collect()
    }

    /// The row of the policy to which the others are compared.
    fn base(&self) -> Option<&Row> {
        let is_base = |row: &&Row| row.policy == placement::DEFAULT.name() && row.trouble.is_none();
        self.policies.iter().find(is_base)
    }

    /// What differs, and the tables: counts of each policy, its times, and its guards by kind.
    pub fn table(&self, paint: Paint) -> String {
        let mut out = self.header(paint);
        let differences = self.differences(paint);
        if !differences.is_empty() {
            out += &(differences.join("\n") + "\n\n");
        }
        let base = self.base();
        let mut counts =
            vec![heading("policy,traces,guards,in loops,executed,/ default,failed,deopts,ns each")];
        counts.extend(self.policies.iter().map(|row| counts_of(row, base)));
        out += &(table(&counts, paint) + "\n");
        if self.policies.iter().any(|row| row.placed.is_some()) {
            out += &(self.placements(paint) + "\n");
        }
        let mut times =
            vec![heading("policy,kept,KiB,compile ms,seconds,/ native,95 %,/ default,95 %")];
        times.extend(self.policies.iter().filter(|row| row.trouble.is_none()).map(times_of));
        if times.len() > 1 {
            out += &(table(&times, paint) + "\n");
        }
        out += &table(&self.by_kind(), paint);
        out += &self.by_site(paint);
        out += &self.notes();
        out
    }

    /// The program, and how it was run.
    fn header(&self, paint: Paint) -> String {
        let native = self.native.map_or("-".to_string(), |s| format!("{s:.3}"));
        let (tier, threshold) = (&self.tier, self.threshold);
        let mut out = format!(
            "{}\n{} time, natively {native} s; --tier {tier} --threshold {threshold}",
            paint.text(Style::Title, &self.command.join(" ")),
            self.clock,
        );
        if self.timed_threshold.is_none() {
            let row = self.base().or(self.policies.iter().find(|row| !row.kept.is_empty()));
            out += " to count, without --threshold to time";
            if let Some((row, kept)) = row.and_then(|row| Some((row, row.typical_kept()?))) {
                let policy = &row.policy;
                out += &match kept {
                    0 => format!(
                        "\n`dynasour run` keeps no trace of this program (--policy {policy}), so its times say \
                         nothing about\nplacement; with --threshold {threshold} the traces that were counted \
                         are timed, too"
                    ),
                    1 => format!(
                        "\n`dynasour run` keeps one trace of this program (--policy {policy})"
                    ),
                    _ => format!(
                        "\n`dynasour run` keeps {kept} traces of this program (--policy {policy})"
                    ),
                };
            }
        }
        out + "\n\n"
    }

    /// The differences from `default` that are worth a line, the largest first.
    fn differences(&self, paint: Paint) -> Vec<String> {
        let Some(base) = self.base() else { return Vec::new() };
        let others = self.policies.iter();
        let others = others.filter(|row| row.policy != base.policy && row.trouble.is_none());
        let mut found: Vec<(f64, String)> = Vec::new();
        for row in others {
            let time = row.to_default.filter(|ratio| beside_one(*ratio));
            let time = time.filter(|ratio| (ratio.median - 1.0).abs() >= WORTH_A_LINE_OF_TIME);
            let guards = ratio_of_counts(row, base).map(|ratio| ratio - 1.0);
            let guards = guards.filter(|change| change.abs() >= WORTH_A_LINE);
            let size = time.map_or(0.0, |t| 1.0 + (t.median - 1.0).abs())
                + guards.map_or(0.0, |change| change.abs().min(1.0));
            let executes = guards.map(|change| {
                let more = if change > 0.0 { "more" } else { "fewer" };
                format!("executes {} {more} guards", percent(change))
            });
            let takes = time.map(|t| {
                let longer = if t.median > 1.0 { "longer" } else { "less time" };
                format!("takes {} {longer} ({})", percent(t.median - 1.0), t.interval(2))
            });
            let rest = match (executes, takes) {
                (Some(executes), Some(takes)) => format!("{takes} and {executes}"),
                (None, Some(takes)) => takes,
                (Some(executes), None) => match row.to_default.filter(|t| t.low.is_some()) {
                    Some(same) => format!("{executes}, in the same time ({})", same.interval(2)),
                    None => executes,
                },
                (None, None) => continue,
            };
            let style = time.map_or(Style::Plain, style_of);
            let line = format!("{} {rest}, compared with {}", row.policy, base.policy);
            found.push((size, paint.text(style, &line)));
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.into_iter().take(LINES).map(|(_, line)| line).collect()
    }

    /// Each policy beside the best placement of its guards (`--counterfactual`).
    fn placements(&self, paint: Paint) -> String {
        let mut lines = vec![heading(
            "policy,executed,best,above,best joined,above,covers,predicted,error,covers",
        )];
        for (row, placed) in self.policies.iter().filter_map(|row| Some((row, row.placed?))) {
            let above = |best| placed.above(best).map_or("-".to_string(), percent);
            let covered = placed.covered().map_or("-".to_string(), percent);
            let compared = placed.compared as f64 / placed.executed.max(1) as f64;
            let error = placed.error().map_or("-".to_string(), |e| format!("{:+.2} %", 100.0 * e));
            lines.push(vec![
                row.policy.clone().into(),
                short(placed.executed).into(),
                short(placed.separate).into(),
                above(placed.separate).into(),
                short(placed.joined).into(),
                above(placed.joined).into(),
                covered.into(),
                short(placed.predicted).into(),
                error.into(),
                percent(compared).into(),
            ]);
        }
        let words = format!(
            "best: each predicate at its cheapest points; joined: one guard for all that are checked at a point;\n\
             predicted: from the outcomes of {BASE}; covers: the share of the guards executed that this is about\n"
        );
        table(&lines, paint) + &words
    }

    /// Executions and failures of guards by kind.
    fn by_kind(&self) -> Vec<Vec<Cell>> {
        let kinds = self.kinds();
        let mut lines = vec![heading("executed / failed")];
        lines[0].extend(kinds.iter().map(|kind| Cell::new(*kind, Style::Title)));
        for row in self.policies.iter().filter(|row| row.trouble.is_none()) {
            let mut line = vec![Cell::from(row.policy.clone())];
            line.extend(kinds.iter().map(|kind| match row.counts.kinds.get(*kind) {
                Some(k) => Cell::from(format!("{} / {}", short(k.executed), short(k.failed))),
                None => Cell::from("-"),
            }));
            lines.push(line);
        }
        lines
    }

    /// The sites in which the policies differ most (`--by-site`), with the two that differ most.
    fn by_site(&self, paint: Paint) -> String {
        let Some(sites) = &self.sites else { return String::new() };
        if sites.is_empty() {
            return "\nthe policies execute the guards of each site equally often\n".to_string();
        }
        let mut lines =
            vec![heading("site,trace,guest code,fewest,executed / failed,most,executed / failed")];
        for site in sites {
            let Some((least, most)) = site.extremes() else { continue };
            let mut line = vec![Cell::from(site.site.clone()), format!("{:x}", site.trace).into()];
            line.push(clipped(&site.symbol).into());
            for counts in [least, most] {
                let numbers = format!("{} / {}", short(counts.executed), short(counts.failed));
                line.extend([Cell::from(counts.policy.clone()), numbers.into()]);
            }
            lines.push(line);
        }
        "\n".to_string() + &table(&lines, paint)
    }

    /// What must be said about the figures.
    fn notes(&self) -> String {
        let mut out = String::new();
        let is_open = |row: &Row| row.deopt_ns.is_none() && !row.deopt_costs.is_empty();
        if self.policies.iter().any(is_open) {
            out += &format!(
                "\n{NOT_DETERMINED}: the cost of a deoptimisation is not determined, because it is smaller \
                 than the noise;\na longer run, or more --runs, may help\n"
            );
        }
        if self.policies.iter().any(|row| row.seconds.is_some_and(|s| s.low.is_none())) {
            out += &format!("\nfewer than {FEWEST_FOR_INTERVAL} runs have no 95 % interval (-)\n");
        }
        if self.policies.iter().any(|row| row.trouble.is_none() && !row.counts.exact) {
            out += "\ncounts are not exact: threads ran one trace at once\n";
        }
        out
    }
}

/// The counts of a policy.
fn counts_of(row: &Row, base: Option<&Row>) -> Vec<Cell> {
    let name = Cell::from(row.policy.clone());
    if let Some(trouble) = &row.trouble {
        return vec![name, Cell::new(trouble.clone(), Style::Gone)];
    }
    let counts = &row.counts;
    let ratio = base.and_then(|base| ratio_of_counts(row, base));
    vec![
        name,
        counts.traces.to_string().into(),
        counts.guards.to_string().into(),
        counts.guards_in_loops.to_string().into(),
        short(counts.executed).into(),
        shown(ratio, 3).into(),
        short(counts.failed).into(),
        short(counts.all_deopts()).into(),
        match row.deopt_ns {
            None if !row.deopt_costs.is_empty() => NOT_DETERMINED.into(),
            cost => shown(cost.map(|r| r.median), 0).into(),
        },
    ]
}

/// The times of a policy.
fn times_of(row: &Row) -> Vec<Cell> {
    let interval = |ratio: Option<Ratio>, digits: usize| {
        Cell::from(ratio.map_or(String::new(), |r| r.interval(digits)))
    };
    let style = row.to_default.filter(|r| beside_one(*r)).map_or(Style::Plain, style_of);
    vec![
        row.policy.clone().into(),
        row.typical_kept().map_or("-".to_string(), |kept| kept.to_string()).into(),
        format!("{:.1}", row.code_bytes as f64 / 1024.0).into(),
        shown(row.compile_ms, 1).into(),
        shown(row.seconds.map(|r| r.median), 3).into(),
        shown(row.to_native.map(|r| r.median), 2).into(),
        interval(row.to_native, 2),
        Cell::new(shown(row.to_default.map(|r| r.median), 3), style),
        interval(row.to_default, 3),
    ]
}

/// The end of a long name of guest code.
fn clipped(symbol: &str) -> String {
    let characters = symbol.chars().count();
    match characters.checked_sub(SYMBOL) {
        None | Some(0) => symbol.to_string(),
        Some(more) => format!("…{}", symbol.chars().skip(more + 1).collect::<String>()),
    }
}

/// Does the interval of a ratio leave out 1?
fn beside_one(ratio: Ratio) -> bool {
    ratio.low.is_some_and(|low| low > 1.0) || ratio.high.is_some_and(|high| high < 1.0)
}

/// The colour of a significant difference.
fn style_of(ratio: Ratio) -> Style {
    if ratio.median > 1.0 { Style::Gone } else { Style::New }
}

/// Guards executed under a policy, divided by those under another.
fn ratio_of_counts(row: &Row, base: &Row) -> Option<f64> {
    (base.counts.executed > 0).then(|| row.counts.executed as f64 / base.counts.executed as f64)
}

/// A share in percent, without its sign.
pub fn percent(share: f64) -> String {
    let percent = 100.0 * share.abs();
    if percent < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A number, or `-`.
pub fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_string(), |v| format!("{v:.digits$}"))
}

/// A report for tests.
#[cfg(test)]
pub mod examples {
    use super::*;
    use crate::guards::counterfactual::Placed;
    use crate::guards::counts::{Counts, KindCounts};

    /// A policy that was measured, and one whose runs differ from native.
    pub fn report() -> Report {
        let ratio = |median: f64| {
            Some(Ratio { median, low: Some(median - 0.01), high: Some(median + 0.01) })
        };
        let kind = KindCounts { guards: 10, executed: 20_000, failed: 3 };
        let counts = Counts {
            traces: 4,
            guards: 10,
            guards_in_loops: 6,
            executed: 20_000,
            failed: 3,
            left: 2,
            kinds: [("branch".to_string(), kind)].into(),
            deopts: [("guard".to_string(), 2)].into(),
            exact: true,
        };
        let good = Row {
            counts: counts.clone(),
            placed: Some(Placed {
                executed: 20_000,
                modelled: 18_000,
                separate: 13_500,
                joined: 9_000,
                compared: 20_000,
                predicted: 20_020,
            }),
            code_bytes: 2048,
            compile_ms: Some(1.5),
            kept: vec![3, 3],
            seconds: ratio(0.5),
            to_native: ratio(1.25),
            to_default: ratio(1.0),
            deopt_ns: ratio(900.0),
            ..Row::new("default", "x")
        };
        let slower = Row {
            policy: "merged".to_string(),
            counts: Counts { executed: 15_000, ..counts },
            placed: None,
            to_default: ratio(1.1),
            ..good.clone()
        };
        let bad = Row { trouble: Some("DIFFERS".to_string()), ..Row::new("eager", "y") };
        Report {
            version: String::new(),
            command: vec!["prog".to_string(), "a,b".to_string()],
            tier: "full".to_string(),
            threshold: 1000,
            timed_threshold: None,
            options: "--tier full".to_string(),
            clock: "cpu".to_string(),
            native: Some(0.4),
            policies: vec![good, slower, bad],
            sites: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::paint::When;
    use crate::guards::table::WIDTH;
    use examples::report;

    #[test]
    fn what_differs_comes_first() {
        let expected = "\
prog a,b
cpu time, natively 0.400 s; --tier full --threshold 1000 to count, without --threshold to time
`dynasour run` keeps 3 traces of this program (--policy default)

merged takes 10 % longer (1.09-1.11) and executes 25 % fewer guards, compared with default

policy    traces  guards  in loops  executed  / default  failed  deopts  ns each
default        4      10         6     20.0k      1.000       3       2      900
merged         4      10         6     15.0k      0.750       3       2      900
eager    DIFFERS

policy   executed   best  above  best joined  above  covers  predicted    error  covers
default     20.0k  13.5k   33 %         9000  100 %    90 %      20.0k  +0.10 %   100 %
best: each predicate at its cheapest points; joined: one guard for all that are checked at a point;
predicted: from the outcomes of eager; covers: the share of the guards executed that this is about

policy   kept  KiB  compile ms  seconds  / native       95 %  / default         95 %
default     3  2.0         1.5    0.500      1.25  1.24-1.26      1.000  0.990-1.010
merged      3  2.0         1.5    0.500      1.25  1.24-1.26      1.100  1.090-1.110

executed / failed     branch
default            20.0k / 3
merged             20.0k / 3
";
        let plain = Paint::new(When::Never, false);
        assert_eq!(report().table(plain), expected);
        assert!(!report().all_agree());
        let mut open = report();
        (open.policies[0].deopt_ns, open.policies[0].deopt_costs) = (None, vec![3.0, -1.0]);
        let table = open.table(plain);
        assert!(table.contains("  n.d.\n") && table.contains("\nn.d.: the cost"), "{table}");
        assert!(table.lines().all(|line| line.chars().count() <= WIDTH), "{table}");
    }

    #[test]
    fn only_significant_times_are_coloured() {
        let painted = report().table(Paint::new(When::Always, false));
        assert!(painted.contains("\u{1b}[31m1.100\u{1b}[39m"), "{painted}");
        assert!(painted.contains("  1.000  "), "{painted}");
    }
}
