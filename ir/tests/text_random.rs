//! Properties of the text form: exact round trip of random versions; no panic on damaged text.

use dynasour_ir::eval::{ForceNth, ModelMachine, run};
use dynasour_ir::random::damage::damaged;
use dynasour_ir::random::{Rng, generate, version as random};
use dynasour_ir::text::{regions, version};
use dynasour_ir::verify::assert_valid;

fn random_version(rng: &mut Rng) -> dynasour_ir::Version {
    if rng.one_in(4) { random::base(rng) } else { random::trace(rng) }
}

#[test]
fn random_versions_round_trip() {
    for seed in 0..4_000 {
        let v = random_version(&mut Rng::new(seed));
        assert_valid(&v);
        let printed = v.to_string();
        match version(&printed) {
            Ok(again) => assert!(again == v, "seed {seed}\n{printed}\n{again}"),
            Err(e) => panic!("seed {seed}: {e}\n{printed}"),
        }
    }
}

#[test]
fn every_operation_occurs() {
    let mut text = String::new();
    (0..1_500).for_each(|seed| text.push_str(&random_version(&mut Rng::new(seed)).to_string()));
    for op in random::pure_ops() {
        assert!(text.contains(&format!(" {op}")), "{op} never occurs");
    }
    for word in [
        "dead", "stores", "poll", "assume", "native", "exit", "jump", "branch", "syscall", "trap",
        "put",
    ] {
        assert!(text.contains(word), "{word} never occurs");
    }
}

/// Damages a text as an editor or a fuzzer would.
fn mutate(rng: &mut Rng, text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..1 + rng.below(2) {
        let at = rng.below(bytes.len());
        match rng.below(5) {
            0 => bytes.truncate(at),
            1 => bytes[at] = rng.pick(b"{}()[]:,=!+-*.#;\"&0919vabn \n\xff"),
            2 => bytes.insert(at, rng.pick(b"{}()[]:,=!+-*.#;\"&0919vabn \n")),
            3 => {
                let end = (at + rng.below(12)).min(bytes.len());
                bytes.drain(at..end);
            }
            _ => {
                let end = (at + rng.below(40)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = rng.below(bytes.len());
                bytes.splice(to..to, piece);
            }
        }
        if bytes.is_empty() {
            return String::new();
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn damaged_text_is_answered() {
    let (mut parsed, mut refused) = (0, 0);
    for seed in 0..6_000 {
        let mut rng = Rng::new(seed);
        let whole = random::trace(&mut rng).to_string();
        let text = mutate(&mut rng, &whole);
        match regions(&text) {
            // A text that parses can be printed, and the verifier answers for it.
            Ok(all) => {
                parsed += 1;
                for v in all.iter().flat_map(|r| &r.versions) {
                    let printed = v.to_string();
                    if dynasour_ir::verify::verify(v).is_ok() {
                        assert_eq!(version(&printed).as_ref(), Ok(v), "seed {seed}\n{printed}");
                    }
                }
            }
            Err(e) => {
                refused += 1;
                assert!(
                    e.line >= 1 && e.line <= text.lines().count() + 1 && e.column >= 1,
                    "seed {seed}: {e}"
                );
            }
        }
    }
    assert!(parsed > 200 && refused > 2_000, "{parsed} parsed, {refused} refused");
}

#[test]
fn random_bytes_are_answered() {
    for seed in 0..2_000 {
        let mut rng = Rng::new(seed);
        let bytes: Vec<u8> = (0..rng.below(200)).map(|_| rng.bits() as u8).collect();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        assert!(version(&text).is_err());
        let ascii: String = bytes.iter().map(|b| (b & 0x7f) as char).collect();
        assert!(version(&format!("region 1 {{ version a {{ {ascii}")).is_err());
    }
}

#[test]
fn damaged_versions_are_answered_and_what_verifies_runs() {
    let mut accepted = 0;
    for seed in 0..6_000 {
        let mut rng = Rng::new(seed);
        let v = damaged(&mut rng);
        if dynasour_ir::verify::verify(&v).is_err() {
            continue;
        }
        accepted += 1;
        let printed = v.to_string();
        assert_eq!(version(&printed).as_ref(), Ok(&v), "seed {seed}\n{printed}");
        let (mut machine, mut state) = (ModelMachine::boundless(seed), generate::state(&mut rng));
        let mut hooks = ForceNth { seen: 0, nth: Some(rng.below(20) as u64) };
        let _ = run(&v, &mut state, &mut machine, &mut hooks, &mut 2_000);
    }
    assert!((2_000..5_000).contains(&accepted), "{accepted} were accepted");
}
