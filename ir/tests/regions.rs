//! Regions: copies with identity anchors, order of dispatch, composition, removal, the rules of
//! labels.

use dynasour_ir::region::{RegionRule, verify_region};
use dynasour_ir::{Context, Fact, Gpr, Region, text};

const SUM: &str = r#"
region 0x1000 {
  version t1 context private_memory {
    anchor a0 = base.0x1000 [rax = v2, rcx = v3]
    anchor a1 = base.0x1008 [rax = v5, rcx = v6]
    b0(v0: i64 = rax, v1: i64 = rcx, v9: i64 = rdi):
      jump b1(v0, v1)
    b1(v2: i64, v3: i64):
      poll else a0
      v4 = load.i64 [v9 + v3*8] !a0
      v5 = add.i64 v2, v4
      v6 = add.i64 v3, 1
      v7 = lt.u.i64 v6, 100
      assume v7 else a1
      jump b1(v5, v6)
  }
  version base {
    b0:
      at 0x1000
      goto 0x1008
  }
}
"#;

fn region(source: &str) -> Region {
    text::regions(source).unwrap_or_else(|e| panic!("{e}")).remove(0)
}

fn names(region: &Region) -> Vec<&str> {
    region.versions.iter().map(|v| v.name.as_str()).collect()
}

/// The region with t2, a copy of t1, inserted.
fn with_copy() -> Region {
    let mut region = region(SUM);
    let copy = region.copy("t1", "t2").unwrap();
    region.insert(copy).unwrap();
    verify_region(&region).unwrap();
    region
}

#[test]
fn a_copy_maps_each_anchor_to_the_same_place_by_identity() {
    let region = with_copy();
    assert_eq!(names(&region), ["t2", "t1", "base"], "newer first, base last");
    let copy = region.version("t2").unwrap().to_string();
    assert!(
        copy.contains(
            "anchor a0 = base.0x1000 [rax = v2, rcx = v3] via t1.a0 [v2 = v2, v3 = v3, v9 = v9]"
        ),
        "{copy}"
    );
    // Live at a1 are the values of the next iteration and the predicate that t1 checks there.
    assert!(copy.contains("via t1.a1 [v5 = v5, v6 = v6, v7 = v7, v9 = v9]"), "{copy}");
    assert_eq!(text::version(&copy).unwrap(), *region.version("t2").unwrap());
    assert!(region.is_frozen("t1") && !region.is_frozen("t2"));
}

#[test]
fn composition_leads_past_a_version_and_lets_it_go() {
    let mut region = with_copy();
    let third = region.copy("t2", "t3").unwrap();
    region.insert(third).unwrap();
    verify_region(&region).unwrap();
    assert_eq!(region.remove_unreferenced(), Vec::<String>::new(), "t3 leads to t2, t2 to t1");
    assert_eq!(region.bypass("t2"), 2);
    verify_region(&region).unwrap();
    assert!(
        region.version("t3").unwrap().to_string().contains("via t1.a0 [v2 = v2, v3 = v3, v9 = v9]")
    );
    assert_eq!(region.remove_unreferenced(), ["t2"]);
    let original = region.version("t1").unwrap().clone();
    assert_eq!(region.compose_all(), 2);
    assert_eq!(region.remove_unreferenced(), ["t1"]);
    let third = region.version("t3").unwrap();
    assert_eq!(third.anchors, original.anchors, "the way through two copies is t1's own");
    assert_eq!(names(&region), ["t3", "base"]);
}

/// Values that are live in the middle version are mapped: sourir's example of 4.6.
#[test]
fn composition_substitutes() {
    let source = r#"
region 0x1000 {
  version v3 {
    anchor a0 = base.0x2000 [rax = 1, rdx = 2] stores [store.i64 [v3 - 8], 7] via v2.a0 [v0 = 1, v1 = v2]
    b0(v0: i64 = rax, v1: i64 = rcx, v3: i64 = rsp):
      v2 = eq.i64 v1, 0
      assume v2 else a0
      exit a0
  }
  version v2 {
    anchor a0 = base.0x2000 [rax = v0, rdx = v4] via v1.a0 [v5 = v4, v6 = v0]
    b0(v0: i64 = rax, v2: i64 = rcx):
      v4 = add.i64 v0, 1
      v1 = eq.i64 v2, 5
      assume v1 else a0
      exit a0
  }
  version v1 {
    anchor a0 = base.0x2000 [rax = v6, rdx = v5]
    b0(v6: i64 = rax):
      v5 = add.i64 v6, 1
      poll else a0
      exit a0
  }
}
"#;
    let mut region = region(source);
    // v4 is live at the label too, and the map does not have it.
    let broken = verify_region(&region).unwrap_err();
    assert!(
        broken.iter().any(|b| matches!(b, RegionRule::Label { what, .. } if what == "v4 is live \
            there and not mapped")),
        "{broken:?}"
    );
    assert_eq!(region.bypass("v2"), 0, "an incomplete map composes to nothing");
    let via = region.versions[0].anchors[0].via.as_mut().unwrap();
    via.values.push((dynasour_ir::Value(4), dynasour_ir::Operand::Const(2)));
    assert_eq!(region.bypass("v2"), 1);
    // Stores that only v3 defers are still deferred.
    let composed =
        "base.0x2000 [rax = 1, rdx = 2] stores [store.i64 [v3 - 8], 7] via v1.a0 [v5 = 2, v6 = 1]";
    assert_eq!(region.versions[0].anchors[0].to_string(), composed);
    assert_eq!(region.remove_unreferenced(), ["v2"]);
    assert_eq!(region.compose_all(), 1);
    assert!(region.versions[0].anchors[0].via.is_none());
}

#[test]
fn contexts_are_ordered_by_implication() {
    let context = |facts: &[Fact]| Context { facts: facts.to_vec() };
    let exact = context(&[Fact::RegEquals(Gpr::RSI, 7)]);
    let small = context(&[Fact::RegInRange { gpr: Gpr::RSI, min: 0, max: 9 }]);
    let wide = context(&[Fact::RegInRange { gpr: Gpr::RSI, min: 0, max: 99 }]);
    let other = context(&[Fact::RegEquals(Gpr::RDI, 7)]);
    let always = Context::default();
    let rising = [&exact, &small, &wide, &always];
    for (i, a) in rising.iter().enumerate() {
        for (k, b) in rising.iter().enumerate() {
            assert_eq!(a.implies(b), i <= k, "{a} implies {b}");
        }
    }
    assert!(!exact.implies(&other) && !other.implies(&exact) && other.implies(&always));

    let bits = context(&[Fact::RegBits { gpr: Gpr::RSI, mask: 7, value: 7 }]);
    let more = context(&[Fact::RegBits { gpr: Gpr::RSI, mask: 15, value: 7 }]);
    assert!(exact.implies(&more) && more.implies(&bits) && bits.implies(&always));
    assert!(!bits.implies(&more) && !small.implies(&bits) && !bits.implies(&small));
    let even = context(&[Fact::RegBits { gpr: Gpr::RSI, mask: 1, value: 0 }]);
    let high = context(&[Fact::RegInRange { gpr: Gpr::RSI, min: 10, max: 99 }]);
    for (a, b) in [(&exact, &even), (&exact, &high), (&small, &high), (&bits, &even)] {
        assert!(a.excludes(b) && b.excludes(a), "{a} and {b}");
    }
    for (a, b) in
        [(&exact, &small), (&wide, &high), (&exact, &other), (&small, &even), (&bits, &more)]
    {
        assert!(!a.excludes(b) && !b.excludes(a), "{a} and {b}");
    }

    let mut region = region(SUM);
    let original = region.versions.remove(0);
    for (name, context) in [
        ("wide", &wide),
        ("always", &always),
        ("exact", &exact),
        ("other", &other),
        ("small", &small),
    ] {
        let mut version = original.clone();
        (version.name, version.context) = (name.to_string(), context.clone());
        region.insert(version).unwrap();
    }
    assert_eq!(names(&region), ["exact", "small", "wide", "other", "always", "base"]);
    let holds = |rsi: u64, rdi: u64| {
        move |c: &Context| {
            c.facts.iter().all(|f| match *f {
                Fact::RegEquals(Gpr::RSI, v) => rsi == v,
                Fact::RegEquals(_, v) => rdi == v,
                Fact::RegInRange { min, max, .. } => (min..=max).contains(&rsi),
                _ => false,
            })
        }
    };
    let dispatched = |rsi, rdi| region.dispatch(holds(rsi, rdi)).unwrap().name.as_str();
    assert_eq!(dispatched(7, 0), "exact");
    assert_eq!(dispatched(8, 0), "small");
    assert_eq!(dispatched(8, 7), "small");
    assert_eq!(dispatched(1000, 7), "other");
    assert_eq!(dispatched(1000, 0), "always");
    // A second version with an exact context shadows the first, which then nothing refers to.
    let mut newer = original;
    (newer.name, newer.context) = ("newer".to_string(), exact);
    region.insert(newer).unwrap();
    assert_eq!(region.remove_unreferenced(), ["exact"]);
}

#[test]
fn labels_are_checked() {
    type Break = fn(&mut Region);
    let cases: [(&str, Break, &str); 6] = [
        (
            "stale anchor",
            |r| r.version_mut("t2").unwrap().anchors[0].via.as_mut().unwrap().anchor.0 = 7,
            "t1 has no a7 in use",
        ),
        ("missing", |r| r.versions.retain(|v| v.name != "t1"), "there is no version t1"),
        (
            "context",
            |r| r.version_mut("t2").unwrap().context.facts.clear(),
            "the context of t1 need not hold",
        ),
        (
            "unmapped",
            |r| {
                r.version_mut("t2").unwrap().anchors[0].via.as_mut().unwrap().values.pop();
            },
            "v9 is live there and not mapped",
        ),
        (
            "type",
            |r| {
                r.version_mut("t2").unwrap().anchors[1].via.as_mut().unwrap().values[2].1 =
                    dynasour_ir::Operand::Const(2)
            },
            "2 is not i1, as v7 is",
        ),
        (
            "cycle",
            |r| {
                let via = r.version("t2").unwrap().anchors[0].via.clone();
                let mut back = via.unwrap();
                back.version = "t2".to_string();
                r.version_mut("t1").unwrap().anchors[0].via = Some(back);
            },
            "t2 leads back to t1",
        ),
    ];
    for (name, break_it, expected) in cases {
        let mut region = with_copy();
        break_it(&mut region);
        let broken = verify_region(&region).unwrap_err();
        assert!(broken.iter().any(|b| b.to_string().contains(expected)), "{name}: {broken:?}");
    }
}
