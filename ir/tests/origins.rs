//! Every guard says where it comes from, whatever the passes make of it.

use dynasour_ir::opt::{OptOptions, optimise_with};
use dynasour_ir::random::cases::{case, passes};
use dynasour_ir::random::{Rng, generate};
use dynasour_ir::{Inst, Op, Origin, OriginKind, Version};
use std::collections::BTreeSet;

fn guards(version: &Version) -> impl Iterator<Item = &Inst> {
    version.blocks.iter().flat_map(|block| &block.insts).filter(|inst| inst.op == Op::Assume)
}

fn origins(version: &Version) -> BTreeSet<Origin> {
    guards(version).flat_map(|guard| guard.origins.iter()).copied().collect()
}

#[test]
fn passes_keep_the_origins_of_guards() {
    let (mut kept, mut merged) = (0, 0);
    for seed in 0..400 {
        let mut program = generate::program(&mut Rng::new(seed));
        for head in generate::heads(&program) {
            let Some(case) = case(&mut program, head, seed) else { continue };
            let built = origins(&case.trace);
            let mut version = case.trace.clone();
            let mut names = passes(&mut Rng::new(seed ^ head));
            // These make one guard of several.
            names.extend(["merge", "conjoin"]);
            optimise_with(&mut version, &names, &OptOptions::default());
            for guard in guards(&version) {
                assert!(!guard.origins.is_empty(), "seed {seed}: {guard}\n{version}");
                let is_known =
                    |origin: &Origin| origin.kind == OriginKind::Alias || built.contains(origin);
                assert!(guard.origins.iter().all(is_known), "seed {seed}: {guard}\n{version}");
                kept += 1;
                merged += u32::from(guard.origins.iter().count() > 1);
            }
            // The text form says it, too.
            let text = version.to_string();
            let parsed = dynasour_ir::text::file(&text);
            let parsed = parsed.unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
            assert_eq!(origins(&parsed.regions[0].versions[0]), origins(&version), "seed {seed}");
        }
    }
    assert!(kept > 1000 && merged > 10, "{kept} {merged}");
}
