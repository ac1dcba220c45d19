//! Compares policies on one program.
//!
//! Each policy has one counting run. Then rounds follow: a native run, then one run under each
//! policy. Each round begins with another policy, so that none always runs first.
//!
//! The cost of a deoptimisation is measured by pairs of runs. In one of the two, `--chaos` makes
//! each guard fail with a probability of one in ten. The difference in time, divided by the
//! difference in deoptimisations, is the cost. The other run also has the machinery of `--chaos`,
//! which links no fragments, but makes nothing fail. A cost that noise can explain is not
//! determined ([`fit::median_cost`]). The two kinds of rounds end separately, by the same options.
//!
//! No data: results go to the rows of [`Report`]. No lock.
//!
//! Example: a pair takes 0.30 s with 200,000 deoptimisations and 0.10 s without. One deoptimisation
//! costs 1,000 ns.

use crate::bench::measure::Sample;
use crate::bench::summary::{FEWEST_FOR_INTERVAL, Ratio, median};
use crate::guards::counterfactual::{self, Base};
use crate::guards::counts::Counts;
use crate::guards::fit;
use crate::guards::report::{Report, Row};
use crate::guards::sites::Sites;
use crate::guards::{Purpose, Run, Session};
use anyhow::{Context, Result, bail};
use dynasour_runtime::config::{Placement, placement};
use dynasour_runtime::observe::attempts::Attempt;
use dynasour_runtime::observe::census::Census;

/// `--chaos` of the run with failures: each guard fails with probability 1/10 at each entry of its
/// fragment (guess; a lower rate needs longer runs for [`ENOUGH_DEOPTS`]).
const OFTEN: &str = "1/10";
/// `--chaos` of the run without failures: the lowest rate that the option accepts. Practically no
/// guard fails.
pub const NEVER: &str = "1/4294967295";
/// Most rounds of the cost measurement: as few as have an interval, because they take two runs of
/// each policy.
const COST_ROUNDS: usize = FEWEST_FOR_INTERVAL;
/// The least difference in deoptimisations for which a cost is reported (guess; with fewer their
/// time is smaller than the noise of the clock).
const ENOUGH_DEOPTS: u64 = 5_000;

/// Measures.
///
/// # Errors
/// Why nothing was measured.
pub fn run(session: &Session, expected: &Sample) -> Result<Report> {
    let policies = chosen(&session.args.policies);
    let rounds = &session.args.rounds;
    let is_timed = session.is_timed(expected);
    let runs = if is_timed { rounds.expected() } else { 0 };
    let costs = if session.args.no_deopt_cost || !is_timed { 0 } else { COST_ROUNDS };
    let each = 1 + runs + 2 * runs.min(costs as u64);
    session.bar.set_length(2 + runs + policies.len() as u64 * each);
    let mut rows: Vec<Row> = policies.iter().map(|p| Row::new(p.name(), p.about())).collect();
    let pipelines = &session.args.pipelines;
    rows.extend(pipelines.iter().map(|p| Row::new(&p.name, &p.about())));
    session.bar.inc_length(pipelines.len() as u64 * each);
    let mut heads = Vec::new();
    let base = match session.args.counterfactual {
        true => {
            session.bar.inc_length(1);
            let mut row = Row::new(counterfactual::BASE, "");
            let (census, _) = count(session, expected, &mut row)?;
            Some(Base::of(&census.with_context(|| {
                let trouble = row.trouble.unwrap_or_default();
                format!(
                    "the run with --policy {}, on which --counterfactual rests: {trouble}",
                    row.policy
                )
            })?))
        }
        false => None,
    };
    let mut sites = session.args.by_site.map(|_| Sites::default());
    for row in &mut rows {
        let (census, tried) = count(session, expected, row)?;
        heads.extend(tried);
        if let (Some(sites), Some(census)) = (&mut sites, &census) {
            sites.add(&row.policy, census);
        }
        row.placed = base.as_ref().zip(census).map(|(base, census)| base.placed(&census));
    }
    let measured = || rows.iter().filter(|row| row.trouble.is_none());
    if measured().count() > 0 && measured().all(|row| row.counts.traces == 0) {
        bail!("{}", session.no_trace(expected, &heads));
    }
    let mut native = Vec::new();
    let mut counter = rounds.begin();
    while is_timed && let Some(round) = counter.next(|| uncertainty(&rows, &native)) {
        session.bar.set_message("native");
        native.push(session.clock(&session.run_once(&session.guest)?));
        for i in 0..rows.len() {
            let row = (round + i) % rows.len();
            time(session, expected, &mut rows[row])?;
        }
    }
    let mut counter = rounds.begin();
    while let Some(round) = counter.next(|| None).filter(|round| *round < costs) {
        for i in 0..rows.len() {
            let row = (round + i) % rows.len();
            cost(session, expected, &mut rows[row])?;
        }
    }
    let base =
        rows.iter().find(|row| row.policy == placement::DEFAULT.name() && row.trouble.is_none());
    let base = base.map(|row| row.times.clone());
    for row in &mut rows {
        row.seconds = Ratio::among(&row.times);
        row.to_native = Ratio::of(&row.times, &native);
        row.to_default = base.as_ref().and_then(|base| Ratio::of(&row.times, base));
        row.deopt_ns = fit::median_cost(&row.deopt_costs);
        row.compile_ms = median(&row.compile_times);
    }
    let most = session.args.by_site.unwrap_or_default() as usize;
    let sites = sites.map(|sites| sites.differing(most));
    Ok(Report::new(session, median(&native), rows, sites))
}

/// The largest share of a ratio to native that half of its interval is; `None` while a ratio has no
/// interval.
fn uncertainty(rows: &[Row], native: &[f64]) -> Option<f64> {
    let sound = rows.iter().filter(|row| row.trouble.is_none());
    sound
        .map(|row| Ratio::of(&row.times, native)?.uncertainty())
        .try_fold(0.0, |most, share| Some(share?.max(most)))
}

/// The requested policies without duplicates.
fn chosen(asked: &[&'static dyn Placement]) -> Vec<&'static dyn Placement> {
    let asked = if asked.is_empty() { placement::PLACEMENTS } else { asked };
    let mut chosen: Vec<&'static dyn Placement> = Vec::new();
    for placement in asked {
        if chosen.iter().all(|known| known.name() != placement.name()) {
            chosen.push(*placement);
        }
    }
    chosen
}

/// Runs the program under a policy, unless an earlier run of that policy has failed.
fn under(
    session: &Session,
    expected: &Sample,
    row: &mut Row,
    purpose: Purpose,
    options: &[&str],
) -> Result<Option<Run>> {
    session.bar.set_message(row.policy.clone());
    if row.trouble.is_some() {
        session.bar.inc(1);
        return Ok(None);
    }
    let pipeline = session.args.pipelines.iter().find(|pipeline| pipeline.name == row.policy);
    let selected = match pipeline {
        Some(pipeline) => pipeline.options().to_vec(),
        None => vec!["--policy".to_string(), row.policy.clone()],
    };
    let selected = selected.iter().map(String::as_str);
    let options: Vec<&str> = selected.chain(options.iter().copied()).collect();
    match session.run_with(purpose, &options, expected)? {
        Ok(run) => Ok(Some(run)),
        Err(trouble) => {
            row.trouble = Some(trouble);
            Ok(None)
        }
    }
}

/// The counting run of a policy. Returns its census, and the heads at which traces were tried.
fn count(
    session: &Session,
    expected: &Sample,
    row: &mut Row,
) -> Result<(Option<Census>, Vec<Attempt>)> {
    let file = session.scratch.path().join("census.json");
    let _ = std::fs::remove_file(&file);
    let name = file.to_str().context("the temporary directory's name is not UTF-8")?;
    let mut options = vec!["--count", name];
    options.extend(session.args.verify_traces.then_some("--verify-traces"));
    options.extend(session.args.prove_traces.then_some("--prove-traces"));
    options.extend(session.args.counterfactual.then_some("--count-detail"));
    let Some(run) = under(session, expected, row, Purpose::Compare, &options)? else {
        return Ok((None, Vec::new()));
    };
    let text = std::fs::read(&file).context("the counting run wrote no census")?;
    let census: Census =
        serde_json::from_slice(&text).context("the census of the counting run is damaged")?;
    row.counts = Counts::of(&census);
    Ok((Some(census), run.stats.heads))
}

/// One timed run of a policy.
fn time(session: &Session, expected: &Sample, row: &mut Row) -> Result<()> {
    if let Some(Run { sample, stats }) = under(session, expected, row, Purpose::Time, &[])? {
        row.times.push(session.clock(&sample));
        row.compile_times.push(stats.compile_nanoseconds as f64 / 1e6);
        row.code_bytes = stats.code_bytes;
        row.kept.push(stats.kept());
    }
    Ok(())
}

/// One pair of runs that measures the cost of a deoptimisation.
fn cost(session: &Session, expected: &Sample, row: &mut Row) -> Result<()> {
    let mut run = |chaos| under(session, expected, row, Purpose::Compare, &["--chaos", chaos]);
    let Some(without) = run(NEVER)? else { return Ok(()) };
    let Some(with) = run(OFTEN)? else { return Ok(()) };
    let more = with.stats.all_deopts().saturating_sub(without.stats.all_deopts());
    if more >= ENOUGH_DEOPTS {
        let longer = session.clock(&with.sample) - session.clock(&without.sample);
        row.deopt_costs.push(longer * 1e9 / more as f64);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_is_measured_once() {
        let names = |asked: &[&'static dyn Placement]| -> Vec<_> {
            chosen(asked).iter().map(|p| p.name()).collect()
        };
        assert_eq!(names(&[]).len(), placement::PLACEMENTS.len());
        let [eager, merged] =
            ["eager", "merged"].map(|name| placement::placement(name).expect("known"));
        assert_eq!(names(&[merged, eager, merged]), ["merged", "eager"]);
    }
}
