//! `--verify-traces`: a trace is compared with the recorded blocks before it is published
//! ([`dynasour_ir::validate`]).
//!
//! First the optimised version is compared, then its machine code, lifted back. A trace that does not do
//! what was recorded is a fault of the translator, so the process ends with
//! [`FAULT`] and a report: what differs, in which state, after which passes, and a file from which
//! `dynasour ir` shows it again.
//!
//! `--prove-traces` tries to prove instead that the version is right, from every state
//! ([`dynasour_ir::prove`]), and that the machine code does what the version does. A trace that is refuted is
//! reported and not used.
//!
//! Data: none; a [`Certificate`] says what was compared. Invariant: guest memory is read and never
//! written. The thread that compiles calls this, and holds no lock.
//!
//! ```text
//! dynasour: trace t7 of 0x401136 does not do what was recorded: t7 leaves …: rax: base 0x5, version 0x6
//! dynasour: the passes that show it: simplify,forward
//! ; dynasour ir diff FILE base t7opt --forks 1000
//! region 0x401136 { … }
//! state "disagreement" { … }
//! ```

use crate::kernel::process::exit as exit_process;
use crate::observe::certificate::{Certificate, Proof};
use dynasour_emitter::ExitId;
use dynasour_emitter::codegen::{CompiledCode, LiftedCode, Request};
use dynasour_guest::lift::LiftedBlock;
use dynasour_ir::eval::check::Code;
use dynasour_ir::opt::OptOptions;
use dynasour_ir::predict::NativeResults;
use dynasour_ir::prove::{self, Claim, Right, Verdict};
use dynasour_ir::validate::{Disagreement, Limits, Start, Subject, blame, validate, validate_code};
use dynasour_ir::{Region, Version};
use dynasour_tracer::{Path, Step};
use rustc_hash::FxHashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

/// The exit status of a run that has made a wrong trace (EX_SOFTWARE of sysexits.h).
pub const FAULT: i32 = 70;

/// The recorded blocks, by their pc.
struct Recorded(FxHashMap<u64, Arc<LiftedBlock>>);

impl Recorded {
    fn of(path: &Path) -> Recorded {
        Recorded(path.all_steps().map(|step| (step.block.pc, step.block.clone())).collect())
    }
}

impl Code for Recorded {
    fn block(&mut self, pc: u64) -> Option<&Version> {
        self.0.get(&pc).map(|block| &block.version)
    }
}

/// What a trace was made from.
pub struct Recording<'a> {
    pub path: &'a Path,
    /// The version before the passes.
    pub built: &'a Version,
    /// What its natives were observed to compute.
    pub results: &'a NativeResults,
    /// Address and size of what the passes took for constant memory.
    pub constants: &'a [(u64, u32)],
    pub read: fn(u64, u32) -> Option<u64>,
    /// Where the cases of its comparisons begin.
    pub start: &'a Start,
}

/// The result of a comparison, unless it is a complaint: then the process ends.
pub fn or_end(compared: Result<Certificate, String>) -> Certificate {
    compared.unwrap_or_else(|complaint| {
        eprint!("{complaint}");
        exit_process(FAULT)
    })
}

/// The process ends if a resolved stub does not do what the record of its exit says.
pub fn stub_or_end(exit: ExitId, compared: Result<(), Box<Disagreement>>) {
    if let Err(disagreement) = compared {
        eprint!(
            "dynasour: the stub of {exit:?} does not do what its record says: {disagreement}\n{}",
            disagreement.setup
        );
        exit_process(FAULT)
    }
}

/// Tries to prove that machine code does what its version does.
pub fn prove_code(version: &Version, (code, request): (&CompiledCode, &Request)) -> Proof {
    let mut solver = solver();
    let mut lifted = LiftedCode::new(code, version, request);
    Proof::new(&prove::prove_code(version, &mut lifted, &mut *solver, prove::Limits::default()))
}

fn solver() -> Box<dyn prove::Solver> {
    prove::solver().unwrap_or_else(|| Box::new(prove::Nobody))
}

impl Recording<'_> {
    fn subject<'s>(&'s self, code: &'s mut Recorded, optimised: &'s Version) -> Subject<'s> {
        let length = |steps: &[Step]| steps.iter().map(|step| u64::from(step.block.count)).sum();
        let others = self.path.others.iter().map(|steps| length(steps)).max().unwrap_or(0);
        Subject {
            code,
            built: self.built,
            optimised,
            entry: *self.path.entry,
            results: self.results,
            read: &self.read,
            constants: self.constants,
            length: u64::max(length(&self.path.steps), others),
            start: self.start,
        }
    }

    /// Compares the trace with the recorded blocks. `passes` have made it, with these options.
    ///
    /// # Errors
    /// They disagree: the report.
    pub fn certify(
        &self,
        optimised: &Version,
        passes: &[&'static str],
        options: &OptOptions,
    ) -> Result<Certificate, String> {
        let since = Instant::now();
        let mut code = Recorded::of(self.path);
        match validate(self.subject(&mut code, optimised), Limits::default()) {
            Ok(report) => Ok(Certificate::new(report, since.elapsed())),
            Err(disagreement) => {
                let subject = self.subject(&mut code, optimised);
                let blamed = match blame(subject, &disagreement, passes, options).as_deref() {
                    Some([]) => "it is wrong as it was built, before any pass".to_string(),
                    Some(passes) => format!("the passes that show it: {}", passes.join(",")),
                    None => format!("only all passes together show it: {}", passes.join(",")),
                };
                Err(self.complaint(optimised, &disagreement, &blamed))
            }
        }
    }

    /// Compares the trace's machine code with the recorded blocks.
    ///
    /// # Errors
    /// They disagree: the report.
    pub fn certify_code(
        &self,
        optimised: &Version,
        (code, request): (&CompiledCode, &Request),
    ) -> Result<Certificate, String> {
        let since = Instant::now();
        let mut lifted = LiftedCode::new(code, optimised, request);
        let mut recorded = Recorded::of(self.path);
        let subject = self.subject(&mut recorded, optimised);
        match validate_code(subject, &mut lifted, Limits::default()) {
            Ok(report) => Ok(Certificate::new(report, since.elapsed())),
            Err(disagreement) => {
                let blamed = "its version is right, its code is wrong: see --log code";
                Err(self.complaint(optimised, &disagreement, blamed))
            }
        }
    }

    /// Tries to prove that the trace does what was recorded.
    ///
    /// # Errors
    /// It does not: this has been reported.
    pub fn prove(&self, optimised: &Version) -> Result<Proof, ()> {
        let mut solver = solver();
        let word = |(address, bytes): &(u64, u32)| {
            Some((*address, *bytes, (self.read)(*address, *bytes)?))
        };
        let constants: Vec<(u64, u32, u64)> = self.constants.iter().filter_map(word).collect();
        let mut recorded = Recorded::of(self.path);
        let right = Right::Program(&mut recorded);
        let claim = Claim { right, version: optimised, constants: &constants };
        let outcome = prove::prove(claim, &mut *solver, prove::Limits::default());
        let Verdict::Refuted { setup, what } = &outcome.verdict else {
            return Ok(Proof::new(&outcome));
        };
        let (name, head) = (&self.built.name, self.built.region);
        eprint!(
            "dynasour: trace {name} of {head:#x} does not do what was recorded, and is not used: {what}\n\
             dynasour: the lines that follow are a file for `dynasour ir diff FILE base {name}opt --forks \
             1000`, with the recorded blocks, the versions, and the state\n{}{setup}",
            self.file(optimised)
        );
        Err(())
    }

    /// The report of a disagreement.
    fn complaint(&self, optimised: &Version, disagreement: &Disagreement, blamed: &str) -> String {
        let (name, head) = (&self.built.name, self.built.region);
        let mut out = format!(
            "dynasour: trace {name} of {head:#x} does not do what was recorded: {disagreement}\n"
        );
        let _ = writeln!(out, "dynasour: {blamed}");
        let wrong = if disagreement.built { name.clone() } else { format!("{name}opt") };
        let _ = writeln!(
            out,
            "dynasour: the lines that follow are a file for `dynasour ir diff FILE base {wrong} --forks \
             1000`, with the recorded blocks, the versions, and the state"
        );
        let _ = write!(out, "{}{}", self.file(optimised), disagreement.setup);
        out
    }

    /// The recorded blocks, the version before the passes and the one after, whose name ends in `opt`, in
    /// the text form.
    fn file(&self, optimised: &Version) -> String {
        let (head, mut out) = (self.built.region, String::new());
        let mut blocks: Vec<_> = Recorded::of(self.path).0.into_iter().collect();
        blocks.sort_by_key(|(pc, _)| (*pc != head, *pc));
        for (pc, block) in blocks {
            let mut region = Region::new(pc);
            if pc == head {
                let renamed =
                    Version { name: format!("{}opt", self.built.name), ..optimised.clone() };
                region.versions.extend([self.built.clone(), renamed]);
            }
            region.versions.push(block.version.clone());
            let _ = write!(out, "{region}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynasour_guest::decode::Bytes;
    use dynasour_guest::lift::lift_block;
    use dynasour_ir::opt::{PIPELINE, optimise};
    use dynasour_ir::text;
    use dynasour_ir::{Context, Fact, Op};
    use dynasour_tracer::policy::DefaultPolicy;
    use dynasour_tracer::{TraceShape, build};
    use std::sync::LazyLock;

    const HEAD: u64 = 0x40_1000;

    /// The path of `add [rdi],rax; sub rcx,1; jnz` back to the `add`, and its version.
    fn recorded() -> (Path, Version) {
        let code = [0x48, 0x01, 0x07, 0x48, 0x83, 0xe9, 0x01, 0x75, 0xf7];
        let block = Arc::new(lift_block(HEAD, &Bytes { start: HEAD, bytes: &code }, 10));
        let mut path = Path {
            head: HEAD,
            shape: TraceShape::Loop,
            steps: vec![Step { block, next: HEAD, observed: None }],
            others: Vec::new(),
            stable: Vec::new(),
            guest: None,
            entry: Box::default(),
            runs: None,
        };
        path.entry.gpr = std::array::from_fn(|i| 0x5000 + 0x100 * i as u64);
        let context = Context { facts: vec![Fact::PrivateMemory] };
        let built = build::build(&path, "t1", context, &DefaultPolicy::default()).expect("built");
        (path, built.version)
    }

    fn certify(path: &Path, built: &Version, optimised: &Version) -> Result<Certificate, String> {
        recording(path, built).certify(optimised, PIPELINE, &OptOptions::default())
    }

    fn recording<'a>(path: &'a Path, built: &'a Version) -> Recording<'a> {
        static RESULTS: LazyLock<NativeResults> = LazyLock::new(NativeResults::default);
        let read = |address, _| Some(address ^ 0x55);
        let start = Box::leak(Box::default());
        Recording { path, built, results: &RESULTS, constants: &[], read, start }
    }

    #[test]
    fn a_right_trace_gets_a_certificate() {
        let (path, built) = recorded();
        let mut optimised = built.clone();
        optimise(&mut optimised, &OptOptions::default());
        let certificate = certify(&path, &built, &optimised).expect("it is right");
        assert!(certificate.whole && certificate.cases > 50, "{certificate:?}");
        let [guards, held, failed] = certificate.guards;
        assert!(guards > 0 && held == guards && failed == guards, "{certificate:?}");
    }

    #[test]
    fn a_wrong_trace_is_reported_with_a_file_that_shows_it() {
        let (path, built) = recorded();
        let mut wrong = built.clone();
        let insts = wrong.blocks.iter_mut().flat_map(|b| &mut b.insts);
        let sum = insts.filter(|i| i.op == Op::Add).last().expect("an addition");
        sum.op = Op::Xor;
        let report = certify(&path, &built, &wrong).expect_err("it is wrong");
        assert!(report.contains("t1 of 0x401000 does not do what was recorded"), "{report}");
        assert!(report.contains("only all passes together show it"), "{report}");
        let lines: Vec<&str> =
            report.lines().filter(|line| !line.starts_with("dynasour: ")).collect();
        let file = text::file(&lines.join("\n")).unwrap_or_else(|e| panic!("{e}\n{report}"));
        let names: Vec<&str> =
            file.regions.iter().flat_map(|r| &r.versions).map(|v| &v.name[..]).collect();
        assert_eq!((names, file.setups.len()), (vec!["t1", "t1opt", "base"], 1), "{report}");
        // A version that is wrong as it was built is not blamed on a pass.
        let report = certify(&path, &wrong, &wrong).expect_err("it is wrong");
        assert!(report.contains("before any pass"), "{report}");
    }
}
