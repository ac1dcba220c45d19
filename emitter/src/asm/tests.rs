//! Each instruction form against iced-x86's decoder: mnemonic, operands and length, with registers
//! of both halves.

use super::buffer::Relocation;
use super::*;
use iced_x86::{Code, Decoder, DecoderOptions, Formatter, NasmFormatter};

/// What the decoder makes of the code.
fn text(make: impl FnOnce(&mut Asm<u64>)) -> String {
    let mut asm = Asm::new();
    make(&mut asm);
    let (bytes, _) = asm.finish();
    let mut formatter = NasmFormatter::new();
    let mut text = String::new();
    for inst in &mut Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE) {
        assert!(!inst.is_invalid(), "{bytes:02x?}");
        if !text.is_empty() {
            text.push_str("; ");
        }
        formatter.format(&inst, &mut text);
    }
    text
}

const NAMES: [[&str; 3]; 16] = [
    ["rax", "eax", "ax"],
    ["rcx", "ecx", "cx"],
    ["rdx", "edx", "dx"],
    ["rbx", "ebx", "bx"],
    ["rsp", "esp", "sp"],
    ["rbp", "ebp", "bp"],
    ["rsi", "esi", "si"],
    ["rdi", "edi", "di"],
    ["r8", "r8d", "r8w"],
    ["r9", "r9d", "r9w"],
    ["r10", "r10d", "r10w"],
    ["r11", "r11d", "r11w"],
    ["r12", "r12d", "r12w"],
    ["r13", "r13d", "r13w"],
    ["r14", "r14d", "r14w"],
    ["r15", "r15d", "r15w"],
];

/// All registers, with their names of 64, 32 and 16 bits.
fn registers() -> impl Iterator<Item = (u8, [&'static str; 3])> {
    (0..).zip(NAMES)
}

#[test]
fn instructions_with_one_register() {
    for (r, [wide, half, word]) in registers() {
        assert_eq!(text(|a| a.store(r, 0x80)), format!("mov [gs:80h],{wide}"));
        assert_eq!(text(|a| a.load(r, 0x80)), format!("mov {wide},[gs:80h]"));
        assert_eq!(text(|a| a.load_half(r, 0x80)), format!("mov {half},[gs:80h]"));
        assert_eq!(text(|a| a.constant(r, 0x1234)), format!("mov {half},1234h"));
        assert_eq!(text(|a| a.constant(r, !0)), format!("mov {wide},0FFFFFFFFFFFFFFFFh"));
        assert_eq!(text(|a| a.constant(r, 1 << 32)), format!("mov {wide},100000000h"));
        assert_eq!(text(|a| a.mov_imm_32(r, 5)), format!("mov {half},5"));
        assert_eq!(text(|a| a.mov_imm_64(r, 5)), format!("mov {wide},5"));
        assert_eq!(text(|a| a.movzx_16(r)), format!("movzx {half},{word}"));
        assert_eq!(text(|a| a.load_16(r, Mem::context(8))), format!("movzx {half},word [gs:8]"));
        assert_eq!(text(|a| a.push(r)), format!("push {wide}"));
        assert_eq!(text(|a| a.pop(r)), format!("pop {wide}"));
        assert_eq!(text(|a| a.rdfsbase(r)), format!("rdfsbase {wide}"));
        assert_eq!(text(|a| a.wrfsbase(r)), format!("wrfsbase {wide}"));
        assert_eq!(text(|a| a.mov_from(r, Mem::relative())), format!("mov {wide},[rel 7]"));
    }
}

#[test]
fn instructions_with_several_registers() {
    for ((a, [a_wide, a_half, _]), (b, [b_wide, b_half, _])) in
        registers().flat_map(|a| registers().map(move |b| (a, b)))
    {
        assert_eq!(text(|asm| asm.mov(a, b)), format!("mov {a_wide},{b_wide}"));
        assert_eq!(text(|asm| asm.pext(a, b, a)), format!("pext {a_wide},{b_wide},{a_wide}"));
        assert_eq!(
            text(|asm| asm.pext_32(a, b, Mem::relative())),
            format!("pext {a_half},{b_half},[rel 9]")
        );
        assert_eq!(
            text(|asm| asm.shrx_32(a, Mem::context(8), b)),
            format!("shrx {a_half},[gs:8],{b_half}")
        );
    }
}

/// All shapes of addresses in one instruction: bases, indices, displacements of no, one and four
/// bytes.
#[test]
fn addresses() {
    let displacements = [(0, ""), (8, "+8"), (-8, "-8"), (0x1234, "+1234h"), (-0x1234, "-1234h")];
    for ((r, [base, ..]), (displacement, end)) in
        registers().flat_map(|r| displacements.map(|d| (r, d)))
    {
        let memory = Mem::at(r).plus(displacement);
        assert_eq!(text(|a| a.mov_from(9, memory)), format!("mov r9,[{base}{end}]"));
        assert_eq!(text(|a| a.mov_from_32(1, memory)), format!("mov ecx,[{base}{end}]"));
        assert_eq!(text(|a| a.mov_to(memory, 9)), format!("mov [{base}{end}],r9"));
        assert_eq!(text(|a| a.lea(9, memory)), format!("lea r9,[{base}{end}]"));
        assert_eq!(text(|a| a.lea_32(1, memory)), format!("lea ecx,[{base}{end}]"));
        assert_eq!(text(|a| a.lea(9, memory.wide())), format!("lea r9,[{base}{end}]"));
        assert_eq!(text(|a| a.mov_from(1, memory.fs())), format!("mov rcx,[fs:{base}{end}]"));
        let mut wide = Vec::new();
        wide.lea(9, memory.wide());
        assert_eq!(wide.len(), if r & 7 == 4 { 8 } else { 7 });
        for (index, [name, ..]) in registers().filter(|(index, _)| *index != RSP) {
            let memory = memory.index(index, 3);
            assert_eq!(text(|a| a.lea(9, memory)), format!("lea r9,[{base}+{name}*8{end}]"));
        }
    }
    for (index, [name, ..]) in registers().filter(|(index, _)| *index != RSP) {
        assert_eq!(
            text(|a| a.jmp_through(Mem::table(0x4000, index))),
            format!("jmp qword [{name}*8+4000h]")
        );
        let landing = Mem::context(0x4000).index(index, 2);
        assert_eq!(text(|a| a.mov_from_32(1, landing)), format!("mov ecx,[gs:{name}*4+4000h]"));
        assert_eq!(
            text(|a| a.mov_to_imm_32(landing, 7)),
            format!("mov dword [gs:{name}*4+4000h],7")
        );
    }
    assert_eq!(text(|a| a.mov_from(9, Mem::absolute(0x4000))), "mov r9,[4000h]");
    assert_eq!(text(|a| a.lea_32(2, Mem::at(RDX).index(RDX, 3))), "lea edx,[rdx+rdx*8]");
}

#[test]
fn immediates() {
    assert_eq!(text(|a| a.store_constant(0x80, 7)), "mov qword [gs:80h],7");
    assert_eq!(text(|a| a.store_byte(0x80, 7)), "mov byte [gs:80h],7");
    assert_eq!(text(|a| a.store_word(0x80, 7)), "mov qword [gs:80h],7");
    let halves = "mov dword [gs:80h],0F2345678h; mov dword [gs:84h],7FFFh";
    assert_eq!(text(|a| a.store_word(0x80, 0x7fff_f234_5678)), halves);
    assert_eq!(
        text(|a| a.mov_to_imm(Mem::at(RSP).plus(-8), -2)),
        "mov qword [rsp-8],0FFFFFFFFFFFFFFFEh"
    );
    assert_eq!(text(|a| a.push_imm(0x202)), "push 202h");
    assert_eq!(text(|a| a.and_eax(0xff00_0000)), "and eax,0FF000000h");
    assert_eq!(text(|a| a.or_eax(0x202)), "or eax,202h");
    let at = Mem::at(RCX).plus(4);
    assert_eq!(text(|a| a.cmp_imm(Width::Dword, at, 0x4433_2211)), "cmp dword [rcx+4],44332211h");
    assert_eq!(text(|a| a.cmp_imm(Width::Word, at, 0x4433_2211)), "cmp word [rcx+4],2211h");
    assert_eq!(text(|a| a.cmp_imm(Width::Byte, at, 0x4433_2211)), "cmp byte [rcx+4],11h");
    assert_eq!(text(|a| a.cmp_zero(false, Mem::context(8))), "cmp dword [gs:8],0");
    assert_eq!(text(|a| a.cmp_zero(true, Mem::context(8))), "cmp qword [gs:8],0");
}

#[test]
fn instructions_without_operands_to_choose() {
    assert_eq!(text(|a| a.pack_flags()), "lahf; seto al");
    assert_eq!(text(|a| a.unpack_flags()), "add al,7Fh; sahf");
    assert_eq!(text(|a| a.pushfq()), "pushf");
    assert_eq!(text(|a| a.popfq()), "popf");
    assert_eq!(text(|a| a.ret()), "ret");
    assert_eq!(text(|a| a.fninit()), "fninit");
    assert_eq!(text(|a| a.vzeroupper()), "vzeroupper");
    assert_eq!(text(|a| a.int3(2)), "int3; int3");
    assert_eq!(text(|a| a.push_from(Mem::relative())), "push qword [rel 6]");
    assert_eq!(text(|a| a.pop_to(Mem::context(8))), "pop qword [gs:8]");
    assert_eq!(text(|a| a.xsave64(Mem::at(RDI).plus(0x240))), "xsave64 [rdi+240h]");
    assert_eq!(text(|a| a.xrstor64(Mem::at(RCX).plus(0x240))), "xrstor64 [rcx+240h]");
    assert_eq!(text(|a| a.ldmxcsr(Mem::at(RSP))), "ldmxcsr [rsp]");
    assert_eq!(text(|a| a.load_8(RCX, Mem::at(RDX).plus(8))), "movzx ecx,byte [rdx+8]");
    for r in 0..16 {
        let load = format!("movups xmm{r},[rdx+240h]");
        assert_eq!(text(|a| a.load_xmm(r, Mem::at(RDX).plus(0x240))), load);
        let load = format!("vmovdqu64 zmm{},[rdx+1240h]", 16 + r);
        assert_eq!(text(|a| a.load_high_zmm_at_rdx(16 + r, 0x1240)), load);
    }
    for r in 0..8 {
        let load = format!("kmovq k{r},[rdx+1240h]");
        assert_eq!(text(|a| a.load_mask_at_rdx(r, 0x1240)), load);
    }
}

#[test]
fn transfers_lead_where_they_say() {
    type Make = fn(&mut Asm<u64>);
    let codes: [(Code, Make); 6] = [
        (Code::Jmp_rel32_64, |a| a.jmp()),
        (Code::Jne_rel32_64, |a| a.jcc(NOT_EQUAL)),
        (Code::Call_rel32_64, |a| a.call()),
        (Code::Jmp_rel8_64, |a| a.jmp_over(0)),
        (Code::Jrcxz_rel8_64, |a| a.jrcxz_over(0)),
        (Code::Loop_rel8_64_RCX, |a| a.loop_over(0)),
    ];
    for (code, make) in codes {
        let mut asm = Asm::new();
        make(&mut asm);
        let (bytes, _) = asm.finish();
        let inst = Decoder::with_ip(64, &bytes, 0x1000, DecoderOptions::NONE).decode();
        assert_eq!(
            (inst.code(), inst.len(), inst.near_branch64()),
            (code, bytes.len(), 0x1000 + bytes.len() as u64)
        );
    }
    for condition in 0..16 {
        let mut asm = Asm::<u64>::new();
        let (forward, back) = (asm.label(), asm.bound());
        asm.jcc_short(condition, forward);
        asm.jcc_to(condition, back);
        asm.jmp_short(back);
        asm.jmp_near(back);
        asm.jrcxz(forward);
        asm.bind(forward);
        let end = asm.offset(forward) as u64;
        asm.jmp_to(0x5000);
        let (bytes, placed) = asm.finish_at(0x1000);
        assert_eq!(placed.range(back, forward), 0x1000..0x1000 + end);
        let all: Vec<_> =
            Decoder::with_ip(64, &bytes, 0x1000, DecoderOptions::NONE).into_iter().collect();
        let targets: Vec<u64> = all.iter().map(|inst| inst.near_branch64()).collect();
        assert_eq!(targets, [0x1000 + end, 0x1000, 0x1000, 0x1000, 0x1000 + end, 0x5000]);
        // iced numbers conditions from 1.
        assert!(all[..2].iter().all(|inst| inst.condition_code() as u8 == condition + 1));
    }
}

#[test]
fn no_operations_do_nothing_and_are_few() {
    for len in 0..40usize {
        let mut code = Vec::new();
        code.nop(len);
        let all: Vec<_> = Decoder::new(64, &code, DecoderOptions::NONE).into_iter().collect();
        assert_eq!((code.len(), all.len()), (len, len.div_ceil(9)));
        assert!(all.iter().all(|inst| inst.mnemonic() == iced_x86::Mnemonic::Nop));
    }
}

#[test]
fn fields_are_aligned_and_move_with_what_is_padded() {
    for start in 0..16 {
        let mut asm = Asm::new();
        asm.nop(start);
        asm.align_field(1);
        asm.jmp();
        let field = asm.relocate(7u32);
        assert!(field % 8 <= 4);
        asm.pad_before(start, 3);
        let (bytes, relocations) = asm.finish();
        assert_eq!(relocations, [Relocation { at: field + 3, target: 7 }]);
        assert_eq!(bytes[field as usize + 2], 0xe9);
    }
}

#[test]
fn instructions_from_outside_are_encoded_as_they_are() {
    let original = [0x48, 0x01, 0x5c, 0xbe, 0x10];
    let inst = Decoder::new(64, &original, DecoderOptions::NONE).decode();
    let mut asm = Asm::<u64>::new();
    asm.instruction(&inst).unwrap();
    asm.instruction(&inst).unwrap();
    assert_eq!(asm.finish().0, original.repeat(2));
}
