//! The allow-lists against iced's tables: every instruction that user mode can execute is on one.

use dynasour_guest::lift::class::{Class, classify, sets_x87_pointer};
use dynasour_ir::Trap;
use iced_x86::{Code, DecoderOptions, EncodingKind, OpCodeOperandKind as Kind, OpCodeTableKind};

/// Instructions of processors that cannot run dynasour, decoded only on request.
pub fn is_foreign(code: Code) -> bool {
    let option = code.op_code().decoder_option();
    option != DecoderOptions::NONE && option != DecoderOptions::AMD
}

/// Can a processor that runs dynasour execute it in 64-bit mode?
pub fn is_executable(code: Code) -> bool {
    let op_code = code.op_code();
    op_code.is_instruction() && op_code.mode64() && !is_foreign(code)
}

/// A near branch with an operand-size prefix, which AMD honours: its target has 16 bits.
pub fn has_short_target(code: Code) -> bool {
    code.op_code().op_kinds().iter().any(|k| matches!(k, Kind::br16_1 | Kind::br16_2))
}

#[test]
fn every_user_mode_instruction_is_on_a_list() {
    let mut counts =
        [("modelled", 0), ("native", 0), ("special", 0), ("trap", 0), ("not in 64-bit mode", 0)];
    let mut unlisted = Vec::new();
    for code in Code::values() {
        let executable = is_executable(code);
        let class = classify(code);
        let row = match class {
            _ if !executable => 4,
            Class::Modelled => 0,
            Class::Native => 1,
            Class::Special => 2,
            Class::Trap(_) => 3,
            Class::Unlisted => {
                unlisted.push(format!("{code:?} {:?}", code.cpuid_features()));
                continue;
            }
        };
        counts[row].1 += 1;
    }
    println!("iced codes: {counts:?}, unlisted: {}", unlisted.len());
    assert!(unlisted.is_empty(), "on no list: {unlisted:#?}");
}

#[test]
fn well_known_instructions_are_where_they_should_be() {
    for (code, class) in [
        (Code::Add_rm64_r64, Class::Modelled),
        (Code::Jne_rel8_64, Class::Modelled),
        (Code::Syscall, Class::Modelled),
        (Code::Div_rm64, Class::Native),
        (Code::EVEX_Vaddpd_zmm_k1z_zmm_zmmm512b64_er, Class::Native),
        (Code::Fld_m80fp, Class::Native),
        (Code::Movsb_m8_m8, Class::Native),
        (Code::Wrfsbase_r64, Class::Special),
        (Code::Mov_r64_cr, Class::Native),
        (Code::Hlt, Class::Native),
        (Code::In_AL_imm8, Class::Native),
        (Code::Mov_Sreg_rm16, Class::Special),
        (Code::Xsavec_mem, Class::Special),
        (Code::Popfq, Class::Special),
        (Code::Ud2, Class::Trap(Trap::Undefined)),
        (Code::Int3, Class::Trap(Trap::Breakpoint)),
        (Code::Mov_r64m16_Sreg, Class::Special),
        (Code::Tzcnt_r64_rm64, Class::Modelled),
    ] {
        assert_eq!(classify(code), class, "{code:?}");
    }
}

#[test]
fn the_lists_agree_with_the_tables_they_do_without() {
    for code in Code::values() {
        let op_code = code.op_code();
        if !is_executable(code) {
            continue;
        }
        let class = classify(code);
        if !op_code.cpl3() {
            let refused = class == Class::Native && code.is_privileged();
            assert!(
                refused || matches!(class, Class::Special | Class::Trap(_)),
                "{code:?} of the kernel: {class:?}"
            );
        }
        let system = |kind: &Kind| {
            matches!(kind, Kind::seg_reg | Kind::tmm_reg | Kind::xbegin_2 | Kind::xbegin_4)
        };
        if op_code.op_kinds().iter().any(system) {
            assert_eq!(class, Class::Special, "{code:?}");
        }
    }
}

#[test]
fn the_escape_opcodes_set_the_x87_pointer() {
    let mut others = Vec::new();
    for code in Code::values().filter(|code| is_executable(*code)) {
        let op_code = code.op_code();
        let opcode = match op_code.op_code() {
            opcode @ 0..=0xff => opcode,
            with_second_byte => with_second_byte >> 8,
        };
        let is_escape = op_code.encoding() == EncodingKind::Legacy
            && op_code.table() == OpCodeTableKind::Normal
            && (0xd8..=0xdf).contains(&opcode);
        let sets = sets_x87_pointer(code);
        assert!(is_escape || !sets, "{code:?}");
        if is_escape && !sets {
            others.push(format!("{:?}", code.mnemonic()));
        }
    }
    others.sort();
    others.dedup();
    assert_eq!(
        others,
        [
            "Fldcw", "Fldenv", "Fnclex", "Fndisi", "Fneni", "Fninit", "Fnsave", "Fnsetpm",
            "Fnstcw", "Fnstenv", "Fnstsw", "Frstor"
        ],
        "the control instructions"
    );
}
