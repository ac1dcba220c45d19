//! Slowdown for several rates of failing guards, and the cost of one deoptimisation.
//!
//! Under `--chaos 1/N` each guard of a fragment is made to fail with probability 1/N at each entry
//! of the fragment. Fragments are not linked then, because each must be entered from the runtime.
//! So each rate is compared with a run that has the same machinery and forces no failure. The cost
//! of the machinery itself is shown, too.
//!
//! The cost of a deoptimisation is the slope of a line through all runs: processor seconds against
//! deoptimisations. It includes everything that follows from one: leaving the fragment, rebuilding
//! the guest's state, interpreting up to the next fragment, and entering that.
//!
//! Data: [`Curve`] has a [`Point`] for each rate. Invariant: a point without trouble has as many
//! times, deoptimisations and entries as rounds. No lock.
//!
//! ```text
//! rate     deopts   seconds
//! none          0     0.500    the base of the slowdowns
//! 1/1000    20.0k     0.520    20 ms for 20,000 deoptimisations: 1,000 ns each
//! ```

use crate::bench::measure::Sample;
use crate::bench::summary::{Ratio, median};
use crate::explain::paint::{Paint, Style};
use crate::guards::compare::NEVER;
use crate::guards::fit::{Estimate, Line, cycles_per_nanosecond};
use crate::guards::report::{field, short};
use crate::guards::table::{Cell, heading, table};
use crate::guards::text::shown;
use crate::guards::{Purpose, Run, Session};
use anyhow::{Result, ensure};
use dynasour_runtime::config::placement;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// The default rates: one failure in this number of draws (guess: evenly spread on a logarithmic
/// scale).
pub const RATES: [u32; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// The least number of deoptimisations at the highest rate for which a cost is reported (guess;
/// with fewer the slope is noise).
const ENOUGH_DEOPTS: f64 = 500.0;

/// The structure that `--json` prints.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Curve {
    /// Version of the dynasour that measured.
    pub version: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The policy.
    pub policy: String,
    /// The tier.
    pub tier: String,
    /// Executions of a trace head before it is compiled.
    pub threshold: u32,
    /// `wall` or `cpu`.
    pub clock: String,
    /// As users run it: fragments linked, no forced failures.
    linked: Point,
    /// Fragments not linked, no forced failures.
    unlinked: Point,
    /// One for each rate.
    rates: Vec<Point>,
    /// The line of seconds against deoptimisations; none if there were too few.
    line: Option<Line>,
    /// Cost of a deoptimisation in nanoseconds: the slope of the line; none if its interval is not
    /// above zero.
    deopt_ns: Option<Estimate>,
    /// The same in cycles.
    deopt_cycles: Option<Estimate>,
    /// Frequency of the processor under load, in GHz.
    cycles_per_nanosecond: f64,
}

/// The runs at one rate.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Point {
    /// One failure in this number of draws; `None` without forced failures.
    one_in: Option<u32>,
    /// Seconds of each run.
    times: Vec<f64>,
    /// Deoptimisations of each run.
    deopts: Vec<u64>,
    /// Entries of fragments of each run.
    entries: Vec<u64>,
    /// Median seconds.
    seconds: Option<Ratio>,
    /// Ratio to `unlinked`.
    slowdown: Option<Ratio>,
    /// What went wrong.
    trouble: Option<String>,
}

impl Point {
    fn add(&mut self, session: &Session, run: &Run) {
        self.times.push(session.clock(&run.sample));
        self.deopts.push(run.stats.all_deopts());
        self.entries.push(run.stats.fragment_entries);
    }

    /// The median count.
    fn typical(counts: &[u64]) -> u64 {
        median(&counts.iter().map(|c| *c as f64).collect::<Vec<_>>()).map_or(0, |m| m as u64)
    }

    /// Computes the medians; `base` are the times that the slowdown is against.
    fn finish(&mut self, base: &[f64]) {
        self.seconds = Ratio::among(&self.times);
        self.slowdown = Ratio::of(&self.times, base);
    }
}

/// Measures.
///
/// # Errors
/// Why nothing was measured.
pub fn run(session: &Session, expected: &Sample) -> Result<Curve> {
    let policy = session.args.policies.first().copied().unwrap_or(placement::DEFAULT);
    let rates = &session.args.rates;
    let rounds = &session.args.rounds;
    session.bar.set_length(2 + rounds.expected() * (rates.len() as u64 + 2));
    let mut points: Vec<Point> =
        [None, None].into_iter().chain(rates.iter().copied().map(Some)).map(point).collect();
    let mut counter = rounds.begin();
    let slope = |points: &[Point]| line(&points[1..])?.slope.uncertainty();
    while counter.next(|| slope(&points)).is_some() {
        for (i, point) in points.iter_mut().enumerate() {
            if point.trouble.is_some() {
                session.bar.inc(1);
                continue;
            }
            let chaos = point
                .one_in
                .map_or(NEVER.to_string(), |n| format!("1/{n},{}", 1 + point.times.len()));
            session.bar.set_message(if i == 0 {
                "linked".to_string()
            } else {
                format!("chaos {chaos}")
            });
            let options = ["--policy", policy.name(), "--chaos", &chaos];
            let options = if i == 0 { &options[..2] } else { &options };
            match session.run_with(Purpose::Compare, options, expected)? {
                Ok(run) => {
                    let message = || session.no_trace(expected, &run.stats.heads);
                    ensure!(run.stats.fragments > 0, "{}", message());
                    point.add(session, &run);
                }
                Err(trouble) => point.trouble = Some(trouble),
            }
        }
    }
    let mut points = points.into_iter();
    let (linked, unlinked) = (points.next().unwrap_or_default(), points.next().unwrap_or_default());
    Ok(Curve::new(session, policy.name(), linked, unlinked, points.collect()))
}

/// The line through all runs of these points; `None` if there were too few deoptimisations.
fn line<'a>(points: impl IntoIterator<Item = &'a Point>) -> Option<Line> {
    let runs = points
        .into_iter()
        .flat_map(|p| p.deopts.iter().map(|d| *d as f64).zip(p.times.iter().copied()));
    let runs: Vec<(f64, f64)> = runs.collect();
    let most = runs.iter().map(|run| run.0).fold(0.0, f64::max);
    Line::through(&runs).filter(|_| most >= ENOUGH_DEOPTS)
}

/// A point without runs.
fn point(one_in: Option<u32>) -> Point {
    Point { one_in, ..Point::default() }
}

impl Curve {
    fn new(
        session: &Session,
        policy: &str,
        mut linked: Point,
        mut unlinked: Point,
        mut rates: Vec<Point>,
    ) -> Curve {
        let base = unlinked.times.clone();
        [&mut linked, &mut unlinked].into_iter().chain(&mut rates).for_each(|p| p.finish(&base));
        let line = line(std::iter::once(&unlinked).chain(&rates));
        let cycles = cycles_per_nanosecond();
        let deopt_ns = line.and_then(|line| line.slope.scaled(1e9).cost());
        let clock = clap::ValueEnum::to_possible_value(&session.args.clock);
        Curve {
            version: env!("CARGO_PKG_VERSION").to_string(),
            command: session
                .guest
                .argv
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            policy: policy.to_string(),
            tier: session.args.machine.tier.to_string(),
            threshold: session.threshold(),
            clock: clock.map_or_else(String::new, |v| v.get_name().to_string()),
            linked,
            unlinked,
            rates,
            line,
            deopt_ns,
            deopt_cycles: deopt_ns.map(|ns| ns.scaled(cycles)),
            cycles_per_nanosecond: cycles,
        }
    }

    /// Did every run agree with native?
    pub fn all_agree(&self) -> bool {
        self.rows().iter().all(|(_, point)| point.trouble.is_none())
    }

    /// Each point with the name of its row.
    fn rows(&self) -> Vec<(String, &Point)> {
        let rate = |p: &Point| p.one_in.map_or("-".to_string(), |n| format!("1/{n}"));
        let fixed = [("linked".to_string(), &self.linked), ("none".to_string(), &self.unlinked)];
        fixed.into_iter().chain(self.rates.iter().map(|p| (rate(p), p))).collect()
    }

    /// The table of the points, and the cost.
    pub fn table(&self, paint: Paint) -> String {
        let mut lines = vec![heading("rate,deopts,entries,seconds,95 %,slowdown,95 %")];
        for (name, point) in self.rows() {
            let mut line = vec![Cell::from(name)];
            if let Some(trouble) = &point.trouble {
                line.push(Cell::new(trouble.clone(), Style::Gone));
                lines.push(line);
                continue;
            }
            line.extend([
                Cell::from(short(Point::typical(&point.deopts))),
                Cell::from(short(Point::typical(&point.entries))),
            ]);
            for (ratio, digits) in [(point.seconds, 3), (point.slowdown, 2)] {
                let is_slower =
                    digits == 2 && ratio.and_then(|r| r.low).is_some_and(|low| low > 1.0);
                let style = if is_slower { Style::Gone } else { Style::Plain };
                line.push(Cell::new(shown(ratio.map(|r| r.median), digits), style));
                line.push(ratio.map_or(String::new(), |r| r.interval(digits)).into());
            }
            lines.push(line);
        }
        let mut out = format!(
            "{}\npolicy {}; {} time; --tier {} --threshold {}\n\n",
            self.command.join(" "),
            self.policy,
            self.clock,
            self.tier,
            self.threshold
        );
        out += &table(&lines, paint);
        out += "\nlinked: as without --chaos; none: --chaos, but nothing is made to fail \
                (slowdowns are against this)\n";
        match (self.line, self.deopt_ns, self.deopt_cycles) {
            (Some(line), Some(ns), Some(cycles)) => {
                let _ = writeln!(
                    out,
                    "a deoptimisation costs {:.0} ns ({:.0}-{:.0}), {:.0} cycles ({:.0}-{:.0}) at \
                     {:.2} GHz\n(least squares over {} runs, 95 %, r2 = {:.3})",
                    ns.value,
                    ns.low,
                    ns.high,
                    cycles.value,
                    cycles.low,
                    cycles.high,
                    self.cycles_per_nanosecond,
                    line.points,
                    line.r_squared
                );
            }
            (Some(line), ..) => {
                let slope = line.slope.scaled(1e9);
                let _ = writeln!(
                    out,
                    "the cost of a deoptimisation is not determined: {:.0} to {:.0} ns fit the {} runs\n(least \
                     squares, 95 %), so noise explains it; a longer run, or more --runs, may help",
                    slope.low, slope.high, line.points
                );
            }
            _ => {
                out += "too few deoptimisations to tell what one costs: a longer run or higher \
                        rates may help\n"
            }
        }
        out
    }

    /// CSV: one line for each run, for fits of other kinds.
    pub fn csv(&self) -> String {
        let mut out = String::from("program,policy,rate,run,deopts,entries,seconds\n");
        for (name, point) in self.rows() {
            for (i, ((deopts, entries), seconds)) in
                point.deopts.iter().zip(&point.entries).zip(&point.times).enumerate()
            {
                let program = field(&self.command.join(" "));
                let _ = writeln!(
                    out,
                    "{program},{},{name},{},{deopts},{entries},{seconds:.6}",
                    self.policy,
                    i + 1
                );
            }
        }
        out
    }
}
