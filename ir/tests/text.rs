//! The text form: round trip and errors.

use dynasour_ir::text::{regions, version};
use dynasour_ir::verify::verify;

/// Parses, verifies, prints, parses again.
#[track_caller]
fn round_trip(text: &str) -> String {
    let parsed = version(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    if let Err(errors) = verify(&parsed) {
        panic!("{errors:#?}\n{parsed}");
    }
    let printed = parsed.to_string();
    let again = version(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
    assert_eq!(again, parsed, "{printed}");
    assert_eq!(again.to_string(), printed);
    printed
}

const LOOP: &str = r#"
region 0x401136 "sum" {
  version t2 context rdi == 100 && private_memory {
    dead flags v8
    anchor a0 = base.0x401140 [rax = v3, rcx = v4, rflags = v5] stores [store.i64 [v6 - 8], 0x401200]
    anchor a1 = base.0x401148 [rax = v10, rcx = v11, rflags = v13]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: flags = rflags, v6: i64 = rsp):
      jump b1(v0, v1, v2)
    b1(v3: i64, v4: i64, v5: flags):
      poll else a0
      v7 = load.i32 [v6 + 16] !a0     ; an access may fault
      v9 = sext32.i64 v7
      v10 = add.i64 v3, v9
      v11 = add.i64 v4, 1
      v12 = lt.s.i64 v11, 100
      assume v12 else a0
      store.i64 [v6 - 8], 0x401200 !a0
      v13 = flags.sub.i64 v11, 100
      assume v12 else a1
      jump b1(v10, v11, v13)
  }
}
"#;

#[test]
fn a_loop_trace() {
    let printed = round_trip(LOOP);
    assert!(printed.contains("      v7 = load.i32 [v6 + 16] !a0\n"), "{printed}");
    assert!(printed.contains("    dead flags v8\n"), "{printed}");
}

#[test]
fn a_base_block() {
    round_trip(
        "region 0x10 { version base {
    b0:
      at 0x10
      v0 = get.i64 rsp
      v1 = get.flags rflags
      v2 = load.i64 fs:[0x28]
      v3 = inc.dummy
  } }"
        .replace(
            "      v3 = inc.dummy\n",
            "      v3 = flags.inc.i64 v2, v1\n      put.flags rflags, v3\n      ret v2\n",
        )
        .as_str(),
    );
}

#[test]
fn every_terminator_of_base() {
    for term in [
        "goto 0x20",
        "goto v0",
        "branch v1 then 0x20 else 0x30",
        "call 0x20 return 0x15",
        "call v0 return 0x15",
        "ret v0",
        "syscall next 0x12",
        "special 0x10",
        "trap undefined 0x10",
        "trap protection 0x10",
        "trap breakpoint 0x11",
        "trap fetch 0x10",
    ] {
        let printed = round_trip(&format!(
            "region 0x10 {{ version base {{ b0:\n at 0x10\n v0 = get.i64 rax\n v1 = eq.i64 v0, \
                -1\n {term}\n }} }}"
        ));
        assert!(printed.contains(&format!("      {term}\n")), "{printed}");
    }
}

#[test]
fn addresses_keep_every_field() {
    for address in [
        "[0]",
        "[v0]",
        "[v0*1]",
        "[v0 + v1*8 - 128]",
        "fs:[v1*2 + 0x12345678]",
        "gs:[#5 + v1*4]",
        "[#-1 + #3*8 - 0x8000000000000000]",
        "[-8]",
        "[#0*2 + 8]",
        "[v0 + 0x7fffffffffffffff]",
    ] {
        let printed = round_trip(&format!(
            "region 1 {{ version base {{ b0:\n at 1\n v0 = get.i64 rax\n v1 = get.i64 rcx\n v2 = \
                load.i8 {address}\n goto 2\n }} }}"
        ));
        assert!(printed.contains(&format!("v2 = load.i8 {address}\n")), "{address}: {printed}");
    }
}

#[test]
fn natives_keep_every_field() {
    let printed = round_trip(
        r#"region 0x10 { version t1 {
    native n0 = 0x10 "f2 0f 58 07" mem 8 vec_read 0x1 vec_write 0x1 writes [mxcsr] effects [read, may_trap, state, read_state]
    native n1 = 0x14 "0f a2" in [rax, rcx] out [rax, rcx, rdx, rbx] effects [no_repeat]
    native n2 = 0x16 "48 0f c8" len 4 in [rax] out [rax] ; with a redundant prefix
    native n3 = 0x20 "d1 d0" in [rax, rflags] out [rax, rflags]
    anchor a0 = base.0x10 [rax = v0, rcx = v1, rflags = v2]
    anchor a1 = base.0x14 [rax = v0, rcx = v1, rflags = v2]
    anchor a2 = base.v5 [rax = v8, rcx = v4, rflags = v9]
    b0(v0: i64 = rax, v1: i64 = rcx, v2: flags = rflags):
      native n0 [v1] !a0
      v3, v4, v5, v6 = native n1 v0, v1 !a1
      v7 = native n2 v3
      v8, v9 = native n3 v7, v2
      exit a2
  } }"#
            .replace("native n1 v0, v1 !a1", "native n1 v0, v1")
            .as_str(),
    );
    assert!(printed.contains("native n0 [v1] !a0 ; addsd xmm0"), "{printed}");
    assert!(printed.contains("\"48 0f c8\" len 4 in"), "{printed}");
}

#[test]
fn negative_constants_fit_their_type() {
    let parsed = version(
        "region 1 { version base { b0:\n at 1\n v0 = get.i64 rax\n v1 = trunc.i32 v0\n v2 = \
            add.i32 v1, -1\n goto 2\n } }",
    );
    let printed = parsed.expect("it parses").to_string();
    assert!(printed.contains("v2 = add.i32 v1, 0xffffffff\n"), "{printed}");
}

#[test]
fn several_versions_of_several_regions() {
    let text =
        "region 1 \"f\" { version base { b0:\n at 1\n goto 2\n } version t1 { anchor a0 = base.2 \
            [] b0:\n exit a0 } }
        region 2 { }";
    let parsed = regions(text).expect("it parses");
    let names: Vec<&str> = parsed[0].versions.iter().map(|v| v.name.as_str()).collect();
    assert_eq!((parsed.len(), names), (2, vec!["base", "t1"]));
    let printed: String = parsed.iter().map(|r| r.to_string()).collect();
    assert_eq!(regions(&printed).expect("printed text parses"), parsed);
}

#[test]
fn errors_name_line_column_and_expectation() {
    let cases = [
        ("x", "line 1, column 1: expected `region`, found `x`"),
        ("region x", "line 1, column 8: expected the region's guest pc, found `x`"),
        (
            "region 1 {\n  version t {\n    b1:\n",
            "line 3, column 5: expected block `b0` or `}`, found `b1`",
        ),
        (
            "region 1 { version t { b0:\n  v0 = add.i64 1,\n",
            "line 3, column 1: expected a value or a number on the line of the `,`, found the end \
                of the text",
        ),
        (
            "region 1 { version t { b0:\n  v0 = frob.i64 1\n",
            "line 2, column 8: expected an operation, found `frob.i64`",
        ),
        (
            "region 1 { version t { b0:\n  v0 = add 1, 2\n",
            "line 2, column 8: expected a type suffix such as `.i64`, found `add`",
        ),
        (
            "region 1 { version t { b0:\n  assume.i64 v0\n",
            "line 2, column 3: expected no type suffix, found `assume.i64`",
        ),
        (
            "region 1 { version t { b0:\n  v0 = load.i64 [v1 + v2]\n",
            "line 2, column 23: expected an index with its scale, or a number, found v2",
        ),
        (
            "region 1 { version t { b0:\n  v0 = add.i64 1, 2 3\n",
            "line 2, column 21: expected the end of the line, found 0x3",
        ),
        (
            "region 1 { version t { b0:\n  v9999999 = add.i64 1, 2\n",
            "line 2, column 3: expected a value number below 1048576, found `v9999999`",
        ),
        (
            "region 99999999999999999999",
            "line 1, column 8: expected a number below 2^64, decimal or 0x hexadecimal, found \
                `99999999999999999999`",
        ),
        ("region 1 \"a\n", "line 1, column 10: expected a closing `\"` on this line, found none"),
        ("region 1 é", "line 1, column 10: expected a token, found 'é'"),
        (
            "region 1 { version t { native n0 = 1 \"06\"",
            "line 1, column 38: expected the bytes of one x86-64 instruction, found \"06\"",
        ),
        (
            "region 1 { version t { anchor a0 = base.1 [eax = 1]",
            "line 1, column 44: expected a guest location such as `rax` or `rflags`, found `eax`",
        ),
    ];
    for (text, error) in cases {
        assert_eq!(regions(text).expect_err(text).to_string(), error, "{text}");
    }
    assert_eq!(
        version("region 1 { }").expect_err("no version").to_string(),
        "line 1, column 1: expected a region with one version, found 0 versions"
    );
}

/// Branches, events and labels in other versions.
#[test]
fn programs_with_branches_round_trip() {
    let source = "region 0x1000 {
  version t2 {
    anchor a0 = base.0x1000 [rax = v0] via t1.a3 [v2 = v0, v7 = 4]
    anchor a1 = base.0x1010 [rax = v1]
    b0(v0: i64 = rax):
      v3 = eq.i64 v0, 0
      poll else a0
      branch v3 then b1(v0) else b2()
    b1(v1: i64):
      print v1
      exit a1
    b2:
      v2 = read
      jump b1(v2)
  }
}
";
    assert_eq!(round_trip(source), source);
    let wrong = source.replace("b2()\n", "b3()\n");
    assert!(
        verify(&version(&wrong).unwrap()).unwrap_err()[0].to_string().contains("b3 does not exist")
    );
}
