//! `dynasour ir opt`: runs optimiser passes over the traces of a file, and shows each before and
//! after.

use super::args::OptArgs;
use super::source::SourceText;
use super::{WRONG, golden, out, plural, refuse, whole};
use anyhow::{Result, bail};
use dynasour_ir::Version;
use dynasour_ir::opt::{OptOptions, PASSES, Pass, PassStat, optimise, pass};
use dynasour_ir::setup::read_only_words;
use dynasour_ir::verify::verify;
use serde_json::json;
use std::cell::RefCell;
use std::ffi::c_int;
use std::time::Instant;

pub(super) fn run(args: &OptArgs) -> Result<c_int> {
    let Some(path) = args.file.as_ref().filter(|_| !args.list) else {
        for pass in PASSES {
            out(format_args!("{:<12} {}\n", pass.name, pass.about));
        }
        return Ok(0);
    };
    let passes = named(&args.passes)?;
    named(&args.skip_pass)?;
    let source = SourceText::read(path)?;
    if args.golden {
        return golden::optimise(&source);
    }
    let mut file = match source.load() {
        Ok(file) => file,
        Err(problems) => return Ok(refuse(&source, &problems)),
    };
    let words = read_only_words(&file.setups);
    let constant = |address: u64, size: u32| {
        words.iter().find(|(at, bytes, _)| (*at, *bytes) == (address, size)).map(|word| word.2)
    };
    let mut status = 0;
    let (mut reports, mut matching) = (Vec::new(), 0);
    for version in file.regions.iter_mut().flat_map(|r| &mut r.versions) {
        if version.is_base() || args.version.as_ref().is_some_and(|name| *name != version.name) {
            continue;
        }
        matching += 1;
        let before = version.clone();
        let done = transform(version, args, &passes, &constant);
        if let Some((pass, what)) = &done.broken {
            eprintln!(
                "dynasour: {:#x} {}: {pass} made a version that does not verify: {what}",
                version.region, version.name
            );
            status = WRONG;
        }
        if args.json {
            reports.push(report(&before, version, &done.stats));
        } else if !args.quiet {
            show(&before, version, &done, args.each);
        }
    }
    if matching == 0 {
        bail!(
            "{} has no trace{}",
            source.name,
            args.version.as_ref().map_or(String::new(), |n| format!(" called {n}"))
        );
    }
    if args.json {
        out(format_args!("{:#}\n", json!({ "versions": reports })));
    } else if args.quiet {
        out(whole(&file, false));
    }
    Ok(status)
}

fn named(names: &[String]) -> Result<Vec<&'static Pass>> {
    let find = |name: &String| {
        pass(name).ok_or_else(|| {
            let near = |p: &&Pass| strsim::damerau_levenshtein(p.name, name) <= 2;
            let near = PASSES.iter().find(near).map(|p| format!(" (did you mean {}?)", p.name));
            anyhow::anyhow!(
                "there is no pass {name}{}; `dynasour ir opt --list` lists them",
                near.unwrap_or_default()
            )
        })
    };
    names.iter().map(find).collect()
}

/// The effects of the passes on one version.
struct Done {
    stats: Vec<PassStat>,
    /// The version after each pass that changed it, if requested.
    stages: Vec<(&'static str, String)>,
    /// The first pass after which the verifier found an error, and the error.
    broken: Option<(String, String)>,
}

fn transform(
    version: &mut Version,
    args: &OptArgs,
    passes: &[&'static Pass],
    constant: &dyn Fn(u64, u32) -> Option<u64>,
) -> Done {
    let broken = RefCell::new(None);
    let stages = RefCell::new(Vec::new());
    let after = |name: &str, v: &Version| {
        if let Err(errors) = verify(v) {
            broken.borrow_mut().get_or_insert((name.to_string(), errors[0].to_string()));
        }
        if args.each
            && let Some(pass) = pass(name)
        {
            stages.borrow_mut().push((pass.name, v.to_string()));
        }
    };
    let options = OptOptions {
        skip: args.skip_pass.clone(),
        after_pass: Some(&after),
        constant_memory: Some(constant),
        ..OptOptions::default()
    };
    let stats = if args.passes.is_empty() {
        optimise(version, &options).passes
    } else {
        passes.iter().map(|pass| one(version, pass, &options)).collect()
    };
    let changed = stats.iter().map(|s| s.changes > 0);
    let stages = stages
        .take()
        .into_iter()
        .zip(changed)
        .filter(|(_, changed)| *changed)
        .map(|(s, _)| s)
        .collect();
    Done { stages, stats, broken: broken.take() }
}

/// Runs one pass that the user named, even where the pipeline would skip it.
fn one(version: &mut Version, pass: &'static Pass, options: &OptOptions) -> PassStat {
    let start = Instant::now();
    let changes = pass.run(version, options);
    let time = start.elapsed();
    if let Some(after) = options.after_pass {
        after(pass.name, version);
    }
    PassStat { name: pass.name, changes, insts: count(version), time }
}

fn count(version: &Version) -> usize {
    version.blocks.iter().map(|b| b.insts.len()).sum()
}

fn show(before: &Version, after: &Version, done: &Done, each: bool) {
    let title = |when: &str, v: &Version| {
        let insts = plural(count(v), "instruction");
        format!(
            "; {:#x} {} {when}: {insts}, {}\n",
            v.region,
            v.name,
            plural(v.anchors.len(), "anchor")
        )
    };
    out(format_args!("{}{before}\n", title("before", before)));
    for (name, text) in done.stages.iter().filter(|_| each) {
        out(format_args!("; after {name}\n{text}\n"));
    }
    for stat in &done.stats {
        let micros = stat.time.as_secs_f64() * 1e6;
        out(format_args!(
            "; {:<12} {:>4} changes {:>5} instructions {micros:>7.0} µs\n",
            stat.name, stat.changes, stat.insts
        ));
    }
    out(format_args!("{}{after}\n", title("after", after)));
}

fn report(before: &Version, after: &Version, stats: &[PassStat]) -> serde_json::Value {
    let passes: Vec<_> = stats
        .iter()
        .map(|s| {
            let micros = s.time.as_secs_f64() * 1e6;
            json!({
                "name": s.name, "changes": s.changes, "instructions": s.insts, "us": micros,
            })
        })
        .collect();
    json!({
        "region": format!("{:#x}", before.region),
        "version": before.name,
        "instructions_before": count(before),
        "instructions_after": count(after),
        "anchors_before": before.anchors.len(),
        "anchors_after": after.anchors.len(),
        "passes": passes,
        "before": before.to_string(),
        "after": after.to_string(),
    })
}
