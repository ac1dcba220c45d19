//! `dynasour ir diff`: runs two versions of a region side by side and reports the first difference.
//!
//! The start states are those of the file, or random ones if it has none. From each state both
//! versions run in the evaluator to their end. What they print and read, where they end, and their
//! final registers, flags and memory must be equal. With `--forks` the second version is also
//! forced to deoptimise, at one opportunity in each run: the result must still be the same
//! (docs/design.md, "The IR").
//!
//! No data, no lock. The worked example is in ir/README.md; `base and t1 agree: 100 runs compared`
//! is the answer if nothing differs.

use super::args::DiffArgs;
use super::eval::{choice, setup, start_pc};
use super::source::SourceText;
use super::{WRONG, out, plural, refuse};
use anyhow::{Result, bail};
use dynasour_ir::eval::program::{
    EventSpot, Outcome, Program, ProgramError, Route, difference, run_program,
};
use dynasour_ir::eval::{Leave, ModelMachine, State};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::text::File;
use dynasour_ir::verify::Where;
use serde_json::json;
use std::ffi::c_int;

type Run = Outcome<ModelMachine>;

/// Number of random states, and seed, if the file has no state (guess; fewer find less).
const DEFAULT_RANDOM: (u64, u64) = (100, 1);

/// A difference as text.
struct Difference {
    /// The start state that showed it.
    from: String,
    /// The opportunity at which the second version was forced to deoptimise.
    forced: Option<u64>,
    /// What differs, the first version first.
    what: String,
    /// The position of the first differing event in each version.
    positions: [Option<String>; 2],
    /// How each run ended.
    ends: [String; 2],
}

pub(super) fn run(args: &DiffArgs) -> Result<c_int> {
    let source = SourceText::read(&args.start.file)?;
    let file = match source.load() {
        Ok(file) => file,
        Err(problems) => return Ok(refuse(&source, &problems)),
    };
    let pc = start_pc(&file, &args.start)?;
    for name in [&args.one, &args.two] {
        let has = |name: &str| file.regions.iter().any(|r| r.pc == pc && r.version(name).is_some());
        if !has(name) && !has("base") {
            bail!("region {pc:#x} has no version {name}");
        }
    }
    let route = |name: &str| {
        choice(&file, Some(name)).map(|choice| Route { choice, follow: args.follow, force: None })
    };
    let routes = [route(&args.one)?, route(&args.two)?];
    let starts = starts(&file, args)?;
    let program = Program::new(&file.regions);
    let (mut runs, mut unfinished, mut opportunities) = (0, 0, 0);
    for (name, state, machine) in &starts {
        let go = |route: &Route| {
            run_program(&program, pc, route, state.clone(), machine.clone(), args.start.steps)
        };
        let compare = |one: &Run, two: &Run, forced| {
            difference(one, two)
                .map(|what| describe(&file, &source, name, forced, what, [one, two]))
        };
        let result = (|| -> Result<Option<Difference>, ProgramError> {
            let (one, two) = (go(&routes[0])?, go(&routes[1])?);
            runs += 1;
            unfinished += u64::from(one.end == Leave::Budget || two.end == Leave::Budget);
            opportunities += two.opportunities;
            if let Some(found) = compare(&one, &two, None) {
                return Ok(Some(found));
            }
            let forks = args.forks.min(two.opportunities);
            for i in 0..forks {
                let nth =
                    (u128::from(i) * u128::from(two.opportunities) / u128::from(forks)) as u64;
                let forked = go(&Route { force: Some(nth), ..routes[1].clone() })?;
                runs += 1;
                if let Some(found) = compare(&one, &forked, Some(nth)) {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        })();
        match result {
            Ok(None) => {}
            Ok(Some(difference)) => {
                report(args, &difference);
                return Ok(WRONG);
            }
            Err(error) => {
                eprintln!("dynasour: from {name}: {error}");
                return Ok(WRONG);
            }
        }
    }
    if args.start.json {
        let summary = json!({
            "differ": false, "runs": runs, "unfinished": unfinished, "opportunities": opportunities,
        });
        out(format_args!("{summary:#}\n"));
    } else {
        let open = if unfinished > 0 {
            format!(", {unfinished} of them out of steps")
        } else {
            String::new()
        };
        out(format_args!(
            "{} and {} agree: {} compared{open}\n",
            args.one,
            args.two,
            plural(runs, "run")
        ));
    }
    Ok(0)
}

/// The start states, with their names.
fn starts(file: &File, args: &DiffArgs) -> Result<Vec<(String, State, ModelMachine)>> {
    let given = !args.start.set.is_empty() || args.start.state.is_some();
    let random = args.random.or((file.setups.is_empty() && !given).then_some(DEFAULT_RANDOM));
    if let Some((count, seed)) = random {
        let one = |i: u64| {
            let mut rng = Rng::new(seed.wrapping_add(i));
            let state = generate::state(&mut rng);
            (
                format!("random state {i} of seed {seed}: {state}"),
                state,
                ModelMachine::boundless(rng.bits()),
            )
        };
        return Ok((0..count).map(one).collect());
    }
    if given {
        let (state, machine) = setup(file, &args.start)?.build();
        return Ok(vec![("the state given".to_string(), state, machine)]);
    }
    let all = file.setups.iter().enumerate().map(|(i, setup)| {
        let (state, machine) = setup.build();
        (
            setup
                .name
                .as_ref()
                .map_or(format!("state {}", i + 1), |name| format!("state \"{name}\"")),
            state,
            machine,
        )
    });
    Ok(all.collect())
}

/// Describes a difference that the comparison of two runs has found. If their prints differ, the
/// first print that differs is described, with its position in each version.
fn describe(
    file: &File,
    source: &SourceText,
    from: &str,
    forced: Option<u64>,
    what: String,
    runs: [&Run; 2],
) -> Difference {
    let printed = runs.map(|r| &r.machine.printed);
    // Events are prints and reads. So the n-th print is found by counting prints.
    let count = printed[0].len().max(printed[1].len());
    let first = (0..count).find(|i| printed[0].get(*i) != printed[1].get(*i));
    let (positions, what) = match first {
        Some(n) => {
            let value = |run: usize| {
                printed[run].get(n).map_or("nothing".to_string(), |v| format!("{v:#x}"))
            };
            let positions = runs.map(|run| {
                nth_print(file, run, n).map(|(spot, line)| position(source, spot, line))
            });
            (positions, format!("print {}: {} and {}", n + 1, value(0), value(1)))
        }
        None => ([None, None], what),
    };
    let ends =
        runs.map(|run| run.visits.last().map_or("nothing was run".to_string(), |v| v.to_string()));
    Difference { from: from.to_string(), forced, what, positions, ends }
}

/// A position in a version, for the user.
fn position(source: &SourceText, spot: &EventSpot, line: usize) -> String {
    format!("{}:{line} ({:#x} {}, {})", source.name, spot.region, spot.version, spot.point)
}

/// The position of the n-th print of a run, with its line.
fn nth_print<'r>(file: &File, run: &'r Run, n: usize) -> Option<(&'r EventSpot, usize)> {
    let prints =
        run.events.iter().filter(|spot| instruction(file, spot).is_some_and(|(print, _)| print));
    let spot = prints.into_iter().nth(n)?;
    Some((spot, instruction(file, spot)?.1))
}

/// Whether the event is a print, and its line.
fn instruction(file: &File, spot: &EventSpot) -> Option<(bool, usize)> {
    let region = file.regions.iter().position(|r| r.pc == spot.region)?;
    let version = file.regions[region].versions.iter().position(|v| v.name == spot.version)?;
    let found = &file.regions[region].versions[version];
    let inst = found.blocks.get(spot.point.block.index())?.insts.get(spot.point.inst)?;
    let line = file.spots[region][version].of(Where::Point(spot.point)).line;
    Some((inst.op == dynasour_ir::Op::Print, line))
}

fn report(args: &DiffArgs, d: &Difference) {
    if args.start.json {
        let summary = json!({
            "differ": true, "from": d.from, "forced": d.forced, "what": d.what,
            "points": d.positions, "ends": d.ends,
        });
        return out(format_args!("{summary:#}\n"));
    }
    let forced =
        d.forced.map_or(String::new(), |n| format!(" with the anchor of opportunity {n} taken"));
    out(format_args!(
        "{} and {} differ from {}{forced}\n  {}\n",
        args.one, args.two, d.from, d.what
    ));
    let versions = [&args.one, &args.two].into_iter();
    for (name, (position, end)) in versions.zip(d.positions.iter().zip(&d.ends)) {
        let position = position.as_ref().map_or(String::new(), |p| format!("at {p}; "));
        out(format_args!("  {name}: {position}at last {end}\n"));
    }
}
