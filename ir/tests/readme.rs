//! The programs of `ir/README.md` verify, round-trip, and do what the page says.

use dynasour_ir::eval::check::{Checked, Limits, check};
use dynasour_ir::eval::{ModelMachine, State};
use dynasour_ir::text::{Region, file, version};
use dynasour_ir::verify::assert_valid;
use dynasour_ir::{Gpr, Version};
use std::collections::BTreeMap;

fn programs() -> Vec<Region> {
    let page = include_str!("../README.md");
    let blocks = page.split("```ir\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.flat_map(|text| file(text).unwrap_or_else(|e| panic!("{e}\n{text}")).regions).collect()
}

#[test]
fn the_programs_verify_and_round_trip() {
    let programs = programs();
    assert_eq!(programs.len(), 4);
    for v in programs.iter().flat_map(|r| &r.versions) {
        assert_valid(v);
        assert_eq!(version(&v.to_string()).as_ref(), Ok(v));
    }
    let page = include_str!("../README.md")
        .split("```ir\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let states = page
        .flat_map(|text| file(text).map(|f| f.setups).unwrap_or_default())
        .map(|s| s.to_string());
    // The short form, without the lists of dead values.
    let printed: String = programs.iter().map(|r| format!("{r:#}")).chain(states).collect();
    for line in include_str!("../README.md")
        .split("```")
        .filter_map(|b| b.strip_prefix("ir\n"))
        .flat_map(str::lines)
    {
        assert!(printed.contains(line), "the printer writes this line in another way: {line}");
    }
}

#[test]
fn the_trace_is_equivalent_to_base_and_transparent() {
    let mut programs = programs().into_iter();
    let mut next = || -> Version {
        programs.next().and_then(|r| r.versions.into_iter().next()).expect("a version")
    };
    let (base, trace) = (next(), next());
    let mut code = BTreeMap::from([(base.region, base)]);
    let mut machine = ModelMachine::new();
    machine.write(0x1_0000, &(0..4096).map(|i| (i * 7) as u8).collect::<Vec<u8>>());
    for (from, to, opportunities) in [(0, 100, 300), (5, 6, 3), (0, 600, 1537)] {
        let mut state = State::default();
        state.gpr[Gpr::RDI.number()] = 0x1_0000;
        state.gpr[Gpr::RCX.number()] = from;
        state.gpr[Gpr::RDX.number()] = to;
        // The last range exceeds the array: the load of its 513th element faults.
        let checked =
            check(&mut code, &trace, &state, &machine, Limits { steps: 10_000, forced: 40 });
        let forced = opportunities.min(40);
        let expected = Checked::Compared {
            evaluations: 1 + forced,
            opportunities: if to == 600 { 1538 } else { opportunities },
        };
        assert_eq!(checked.map_err(|m| m.to_string()), Ok(expected));
    }
}
