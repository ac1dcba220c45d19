//! Code generation apart from placing: it needs no emitter, and a request is good until everything
//! is dropped.

mod harness;

use dynasour_emitter::codegen::{self, Allocator, CompiledCode, Request};
use dynasour_emitter::{EmitError, EntryState, ExitId, FragmentId, SiteKind};
use dynasour_ir::Version;
use dynasour_ir::eval::State;
use dynasour_ir::text::version;
use harness::Bench;

/// Leaves by a guard unless rbx is 7, else adds it to rax.
fn guarded(pc: u64) -> Version {
    let text = format!(
        "region {pc:#x} {{ version t1 {{
    anchor a0 = base.0x5000 []
    anchor a1 = base.0x6000 [rax = v3]
    b0(v0: i64 = rax, v1: i64 = rbx):
      v2 = eq.i64 v1, 7
      assume v2 else a0
      v3 = add.i64 v0, v1
      exit a1
  }} }}"
    );
    version(&text).expect("a version")
}

fn compiled(version: &Version, request: &Request) -> CompiledCode {
    codegen::compile(version, request, &mut Allocator::default())
        .expect("a trace that can be compiled")
}

/// The code of a fragment, which has nothing that depends on its place but relative jumps.
fn listing(bench: &Bench, fragment: FragmentId) -> Vec<String> {
    let text = bench.emitter.listing(fragment).expect("a fragment");
    text.lines()
        .map(|line| line.split_whitespace().nth(1).unwrap_or_default().to_string())
        .collect()
}

#[test]
fn threads_compile_at_once_what_is_placed_in_any_order() {
    let mut bench = Bench::new();
    let versions = [guarded(0x1000), guarded(0x2000), guarded(0x3000)];
    let requests = versions
        .each_ref()
        .map(|v| bench.emitter.request(v.region, EntryState::Canonical).unwrap());
    let mut codes: Vec<CompiledCode> = std::thread::scope(|scope| {
        let jobs: Vec<_> = versions.iter().zip(&requests).collect();
        let running: Vec<_> =
            jobs.into_iter().map(|(v, request)| scope.spawn(|| compiled(v, request))).collect();
        running.into_iter().map(|job| job.join().expect("a compiled trace")).collect()
    });
    let mut fragments = Vec::new();
    for request in requests.iter().rev() {
        fragments.push(
            bench.emitter.place(request, codes.pop().expect("one for each request")).unwrap(),
        );
    }
    let texts: Vec<Vec<String>> = fragments.iter().map(|f| listing(&bench, *f)).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    for (fragment, pc) in fragments.into_iter().zip([0x3000, 0x2000, 0x1000]) {
        assert_eq!(bench.emitter.fragment(fragment).unwrap().pc, pc);
        let mut state = State::default();
        (state.gpr[0], state.gpr[3]) = (35, 7);
        let out = bench.run(fragment, &state);
        assert_eq!((out.pc, out.state.gpr[0]), (0x6000, 42));
    }
}

#[test]
fn requests_are_refused_when_everything_was_dropped() {
    let mut bench = Bench::new();
    let version = guarded(0x1000);
    let request = bench.emitter.request(version.region, EntryState::Canonical).unwrap();
    let code = compiled(&version, &request);
    let fragment = bench.emitter.place(&request, code).unwrap();
    let exits = bench.emitter.fragment(fragment).unwrap().exits.clone();
    let kind = |exit: &ExitId| bench.emitter.exit(*exit).map(|e| e.kind);
    let guard =
        exits.map(ExitId).find(|exit| kind(exit) == Some(SiteKind::Guard)).expect("a guard");
    let side = guarded(0x5000);
    let request = bench.emitter.request(side.region, EntryState::FromExit(guard)).unwrap();
    let (first, second) = (compiled(&side, &request), compiled(&side, &request));
    assert!(bench.emitter.place(&request, first).is_ok());
    bench.emitter.flush_all();
    assert!(matches!(bench.emitter.place(&request, second), Err(EmitError::Stale)));
    assert!(matches!(
        bench.emitter.request(side.region, EntryState::FromExit(guard)),
        Err(EmitError::Unknown)
    ));
}
