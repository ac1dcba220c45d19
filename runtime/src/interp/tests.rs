//! Small programs, assembled with iced and interpreted at the address where they were assembled.
//!
//! This file has the guest of the tests and the programs that check what a run leaves behind.
//! [`edges`] checks what a policy sees, [`handlers`] compares each operation with its semantics.

mod edges;
mod handlers;

use super::xstate::Layout;
use super::*;
use crate::memory::test_handler;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use std::time::Instant;

/// Guest code and a guest thread for it.
struct Guest {
    code: Vec<u8>,
    context: Box<ThreadContext>,
    interp: Interp,
}

impl Guest {
    /// Assembles a program. rsp points to the end of a stack of one page; the page after it cannot
    /// be accessed.
    fn new(program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Guest {
        test_handler::install();
        let mut asm = CodeAssembler::new(64).unwrap();
        program(&mut asm).unwrap();
        // Branches are relative, so the code can be assembled for address 0 and run anywhere.
        let code = asm.assemble(0).unwrap();
        let mut context = ThreadContext::new();
        context.rip = code.as_ptr() as u64;
        context.gpr[4] = test_handler::page_then_hole() + 4096;
        Guest { code, context, interp: Interp::new() }
    }

    fn base(&self) -> u64 {
        self.code.as_ptr() as u64
    }

    fn run(&mut self) -> Stop<Infallible> {
        self.interp.run(&mut self.context, &mut NoPolicy)
    }
}

#[test]
fn a_loop_until_its_syscall() {
    let mut guest = Guest::new(|a| {
        let mut head = a.create_label();
        a.mov(eax, 0)?;
        a.mov(ecx, 100)?;
        a.set_label(&mut head)?;
        a.add(eax, ecx)?;
        a.sub(ecx, 1)?;
        a.jne(head)?;
        a.syscall()
    });
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!(guest.context.gpr[0], 5050);
    assert_eq!(guest.context.rip, guest.base() + guest.code.len() as u64);
    assert_eq!(guest.context.rflags & ARITH_FLAGS, 0x44, "ZF and PF of the last sub");
}

#[test]
fn call_push_pop_and_ret() {
    let mut guest = Guest::new(|a| {
        let mut f = a.create_label();
        a.mov(rdi, 7u64)?;
        a.push(rdi)?;
        a.call(f)?;
        a.pop(rsi)?;
        a.syscall()?;
        a.set_label(&mut f)?;
        a.lea(rax, ptr(rdi + rdi * 4 + 3))?;
        a.ret()
    });
    let top = guest.context.gpr[4];
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[6], guest.context.gpr[4]), (38, 7, top));
}

#[test]
fn a_fault_shows_the_state_before_its_instruction() {
    let mut guest = Guest::new(|a| {
        a.mov(eax, 5)?;
        a.cmp(eax, 7)?;
        a.mov(eax, 9)?;
        a.push(rax)?;
        a.mov(rbx, qword_ptr(rsp + 8))?;
        a.syscall()
    });
    let top = guest.context.gpr[4];
    let Stop::Fault { pc, info } = guest.run() else { panic!("no fault") };
    assert_eq!(info.addr, top);
    assert_eq!(info.signal, libc::SIGSEGV);
    assert_eq!(guest.context.rip, pc);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[4], guest.context.gpr[3]), (9, top - 8, 0));
    // 5 - 7: CF, SF, AF; 0xfe has seven bits set, so no PF.
    assert_eq!(guest.context.rflags & ARITH_FLAGS, 0x91);
}

#[test]
fn rep_movsb_stops_in_the_middle_and_goes_on() {
    let mut guest = Guest::new(|a| {
        a.cmp(rcx, rsi)?;
        a.rep().movsb()?;
        a.syscall()
    });
    let to = guest.context.gpr[4] - 10;
    let from = to - 100;
    // SAFETY: the page belongs to the test.
    unsafe { std::ptr::copy_nonoverlapping(b"0123456789abcdef".as_ptr(), from as *mut u8, 16) };
    guest.context.gpr[1] = 16;
    guest.context.gpr[6] = from;
    guest.context.gpr[7] = to;
    guest.context.rflags |= 0x8d5;
    let expected = dynasour_ir::hostflags::flags(dynasour_ir::FlagOp::Sub, Ty::I64, &[16, from]);
    assert!(matches!(guest.run(), Stop::Fault { info, .. } if info.addr == to + 10));
    assert_eq!(
        (guest.context.gpr[1], guest.context.gpr[6], guest.context.gpr[7]),
        (6, from + 10, to + 10)
    );
    assert_eq!(
        guest.context.rflags & ARITH_FLAGS,
        expected,
        "flags of the cmp, though rcx has changed since"
    );
    // SAFETY: makes the hole behind the test's page accessible.
    unsafe { libc::mprotect((to + 10) as *mut _, 4096, libc::PROT_READ | libc::PROT_WRITE) };
    assert_eq!(guest.run(), Stop::Syscall);
    // SAFETY: the pages belong to the test.
    assert_eq!(unsafe { std::slice::from_raw_parts(to as *const u8, 16) }, b"0123456789abcdef");
}

#[test]
fn a_faulting_lodsd_keeps_its_destination() {
    let mut guest = Guest::new(|a| {
        a.lodsd()?;
        a.syscall()
    });
    let hole = guest.context.gpr[4];
    guest.context.gpr[0] = 0x1122_3344_5566_7788;
    guest.context.gpr[6] = hole;
    assert!(matches!(guest.run(), Stop::Fault { info, .. } if info.addr == hole));
    assert_eq!((guest.context.gpr[0], guest.context.gpr[6]), (0x1122_3344_5566_7788, hole));
}

#[test]
fn a_gather_stops_at_the_hole_with_its_progress() {
    if !Layout::get().has_avx512() {
        println!("this machine has no AVX-512");
        return;
    }
    let mut guest = Guest::new(|a| {
        a.kxnorw(k1, k1, k1)?;
        a.vpgatherdd(zmm1.k1(), dword_ptr(rbx + zmm2 * 4))?;
        a.syscall()
    });
    let hole = guest.context.gpr[4];
    guest.context.gpr[3] = hole - 4 * 5;
    for lane in 0..5u32 {
        // SAFETY: the page belongs to the test.
        unsafe { memory::store(hole - 4 * u64::from(5 - lane), 100 + lane).unwrap() };
    }
    let layout = Layout::get();
    let put = |context: &mut ThreadContext, register: usize, lane: usize, v: u32| {
        let at = match lane {
            0..4 => xstate::LEGACY_VECTORS + 16 * register + 4 * lane,
            4..8 => layout.avx + 16 * register + 4 * (lane - 4),
            _ => layout.zmm_high + 32 * register + 4 * (lane - 8),
        };
        context.xstate.0[at..at + 4].copy_from_slice(&v.to_le_bytes());
    };
    for lane in 0..16 {
        put(&mut guest.context, 2, lane, lane as u32);
        put(&mut guest.context, 1, lane, 7);
    }
    xstate::set_valid(&mut guest.context, xstate::SSE | xstate::AVX | xstate::ZMM_HIGH);
    assert!(matches!(guest.run(), Stop::Fault { info, .. } if info.addr == hole));
    let mut mask = [0; 2];
    mask.copy_from_slice(&guest.context.xstate.0[layout.opmask + 8..layout.opmask + 10]);
    // The lanes before the fault may be done (and then their mask bits are clear); the others keep
    // the old value.
    let mask = u16::from_le_bytes(mask);
    assert_eq!(mask & 0xffe0, 0xffe0);
    assert_eq!(guest.context.xstate.0[layout.zmm_high + 32], 7);
    // SAFETY: makes the hole behind the test's page accessible.
    unsafe { libc::mprotect(hole as *mut _, 4096, libc::PROT_READ | libc::PROT_WRITE) };
    assert_eq!(guest.run(), Stop::Syscall);
    let low = &guest.context.xstate.0[xstate::LEGACY_VECTORS + 16..][..16];
    assert_eq!(low, [100u32, 101, 102, 103].map(u32::to_le_bytes).concat());
    assert_eq!(guest.context.xstate.0[layout.zmm_high + 32], 0);
}

#[test]
fn implicit_operands_are_addressed_in_their_segment() {
    let mut guest = Guest::new(|a| {
        a.db(&[0x64, 0xac])?; // lodsb fs:[rsi]
        a.db(&[0xf3, 0x65, 0xa4])?; // rep movsb es:[rdi], gs:[rsi]
        a.db(&[0x65, 0x66, 0x0f, 0xf7, 0xc1])?; // maskmovdqu gs:[rdi], xmm0, xmm1
        a.syscall()
    });
    let mut source: Vec<u8> = (0..64).collect();
    let mut target = [0xffu8; 8];
    guest.context.fs_base = source.as_ptr() as u64 - 1000;
    guest.context.gs_base = source.as_mut_ptr() as u64 - 1002;
    guest.context.gpr[6] = 1007;
    guest.context.gpr[7] = target.as_mut_ptr() as u64;
    guest.context.gpr[1] = 3;
    let xmm = |n: usize| xstate::LEGACY_VECTORS + 16 * n;
    guest.context.xstate.0[xmm(0)..xmm(0) + 16].fill(0xaa);
    guest.context.xstate.0[xmm(1)..xmm(1) + 16].fill(0);
    guest.context.xstate.0[xmm(1) + 2] = 0x80;
    xstate::set_valid(&mut guest.context, xstate::SSE);
    assert_eq!(guest.interp.run_one(&mut guest.context), None);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[6]), (7, 1008));
    assert_eq!(guest.interp.run_one(&mut guest.context), None);
    assert_eq!(target, [6, 7, 8, 0xff, 0xff, 0xff, 0xff, 0xff]);
    assert_eq!((guest.context.gpr[1], guest.context.gpr[6]), (0, 1011));
    guest.context.gpr[7] = 1002 + 20;
    assert_eq!(guest.run(), Stop::Syscall);
    source[22] ^= 0xaa ^ 22;
    assert!(source.iter().enumerate().all(|(i, b)| *b == i as u8), "{source:?}");
}

#[test]
fn division_by_zero_is_a_fault_with_sigfpe() {
    let mut guest = Guest::new(|a| {
        a.xor(edx, edx)?;
        a.div(ecx)?;
        a.syscall()
    });
    guest.context.gpr[0] = 100;
    let Stop::Fault { info, pc } = guest.run() else { panic!("no fault") };
    assert_eq!((info.signal, guest.context.rip, guest.context.gpr[0]), (libc::SIGFPE, pc, 100));
    guest.context.gpr[1] = 7;
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[2]), (14, 2));
}

#[test]
fn stepping_executes_one_instruction() {
    let mut guest = Guest::new(|a| {
        let mut out = a.create_label();
        a.mov(eax, 1)?;
        a.test(eax, eax)?;
        a.jne(out)?;
        a.ud2()?;
        a.set_label(&mut out)?;
        a.ud2()
    });
    let base = guest.base();
    for rip in [5, 7, 11] {
        assert_eq!(guest.interp.run_one(&mut guest.context), None);
        assert_eq!(guest.context.rip, base + rip);
    }
    let trap = Stop::Trap { pc: base + 11, trap: Trap::Undefined };
    assert_eq!(guest.interp.run_one(&mut guest.context), Some(trap));
    assert_eq!(guest.context.rip, base + 11);
}

#[test]
fn pending_stops_at_a_block_and_unreadable_code_traps() {
    let mut guest = Guest::new(|a| a.jmp(rax));
    guest.context.pending.store(1, Ordering::Relaxed);
    assert_eq!(guest.run(), Stop::Pending);
    assert_eq!(guest.context.rip, guest.base());
    guest.context.pending.store(0, Ordering::Relaxed);
    guest.context.gpr[0] = 0x10;
    assert_eq!(guest.run(), Stop::Trap { pc: 0x10, trap: Trap::Fetch });
}

#[test]
fn jumps_and_returns_to_noncanonical_addresses_stop_before_themselves() {
    const TARGET: u64 = 1 << 63;
    let mut guest = Guest::new(|a| {
        let mut out = a.create_label();
        a.jmp(out)?;
        a.set_label(&mut out)?;
        a.push(rax)?;
        a.ret()?;
        a.jmp(rax)
    });
    let base = guest.base();
    guest.context.gpr[0] = TARGET;
    let stack = guest.context.gpr[4];
    for at in [3, 4] {
        assert_eq!(guest.run(), Stop::Trap { pc: base + at, trap: Trap::Protection });
        assert_eq!((guest.context.rip, guest.context.gpr[4]), (base + at, stack - 8));
        assert_eq!(
            guest.interp.run_one(&mut guest.context),
            Some(Stop::Trap { pc: base + at, trap: Trap::Protection })
        );
        assert_eq!((guest.context.rip, guest.context.gpr[4]), (base + at, stack - 8));
        guest.context.rip = base + 4;
    }
}

#[test]
fn invalidated_blocks_are_made_again() {
    let mut guest = Guest::new(|a| {
        let mut next = a.create_label();
        a.mov(eax, 1)?;
        a.jmp(next)?;
        a.set_label(&mut next)?;
        a.syscall()
    });
    let base = guest.base();
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!(guest.context.gpr[0], 1);
    guest.code[1] = 2;
    assert!(!guest.interp.invalidate(base + 100, base + 200));
    assert!(guest.interp.invalidate(base, base + 1));
    assert!(!guest.interp.invalidate(base, base + 1));
    guest.context.rip = base;
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!(guest.context.gpr[0], 2);
    assert_eq!(guest.interp.block_count(), 2);
    guest.interp.invalidate_all();
    assert_eq!(guest.interp.block_count(), 0);
}

/// Guest memory that stores may change.
struct WritableCode;

impl Fetch for WritableCode {
    fn fetch(&self, addr: u64, buf: &mut [u8]) -> usize {
        GuestCode.fetch(addr, buf)
    }

    fn is_writable(&self, _: std::ops::Range<u64>) -> bool {
        true
    }
}

#[test]
fn writable_blocks_look_at_their_bytes_and_end_at_stores() {
    let mut guest = Guest::new(|a| {
        a.mov(eax, 1)?; // 5 bytes
        a.mov(byte_ptr(rbx), cl)?;
        a.mov(edx, 2)?;
        a.syscall()
    });
    guest.interp = Interp::with_code(Box::new(WritableCode));
    // The store changes the constant behind it.
    guest.context.gpr[3] = guest.base() + 8;
    guest.context.gpr[1] = 77;
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[2]), (1, 77));
    let entry = guest.interp.entry(guest.base()).unwrap();
    assert!(entry.lifted().checked.is_some() && entry.count == 2);
    // No invalidation announces that this byte changes.
    guest.code[1] = 5;
    guest.context.rip = guest.base();
    assert_eq!(guest.interp.run_one(&mut guest.context), None);
    assert_eq!(guest.context.gpr[0], 5);
    guest.code[1] = 6;
    guest.context.rip = guest.base();
    assert_eq!(guest.interp.run_one(&mut guest.context), None);
    assert_eq!(guest.context.gpr[0], 6);
    guest.context.rip = guest.base();
    guest.context.gpr[1] = 78;
    assert_eq!(guest.run(), Stop::Syscall);
    assert_eq!((guest.context.gpr[0], guest.context.gpr[2]), (6, 78));
}

#[test]
fn vector_state_and_mxcsr_live_in_the_context() {
    let mut guest = Guest::new(|a| {
        a.mov(rax, 0x3ff8_0000_0000_0000u64)?;
        a.movq(xmm3, rax)?;
        a.addsd(xmm3, xmm3)?;
        a.movsd_2(qword_ptr(rsp - 8), xmm3)?;
        a.mov(rcx, qword_ptr(rsp - 8))?;
        a.divsd(xmm3, xmm4)?;
        a.stmxcsr(dword_ptr(rsp - 16))?;
        a.mov(edx, dword_ptr(rsp - 16))?;
        a.fld1()?;
        a.fadd_2(st0, st0)?;
        a.fstp(qword_ptr(rsp - 8))?;
        a.mov(rbx, qword_ptr(rsp - 8))?;
        a.syscall()
    });
    assert_eq!(guest.run(), Stop::Syscall);
    let gpr = &guest.context.gpr;
    assert_eq!(gpr[1], 3f64.to_bits());
    assert_eq!(gpr[2], 0x1f84, "division by zero is noted in the guest's MXCSR");
    assert_eq!(gpr[3], 2f64.to_bits());
    assert_eq!(xstate::valid(&guest.context) & xstate::AVX, 0, "upper halves stay unused");
    assert_eq!(1.5f64 / std::hint::black_box(2.0), 0.75);
}

#[test]
fn unmasked_floating_point_exceptions_are_faults() {
    let mut guest = Guest::new(|a| {
        a.ldmxcsr(dword_ptr(rsp - 8))?;
        a.divsd(xmm1, xmm0)?;
        a.syscall()
    });
    let at = guest.context.gpr[4] - 8;
    // SAFETY: the page belongs to the test.
    unsafe { crate::memory::store(at, 0x1d80u32).unwrap() };
    guest.context.xstate.0[xstate::LEGACY_VECTORS + 16..][..8]
        .copy_from_slice(&1f64.to_bits().to_le_bytes());
    xstate::set_valid(&mut guest.context, xstate::SSE);
    let stop = guest.run();
    assert!(matches!(stop, Stop::Fault { info, .. } if info.signal == libc::SIGFPE), "{stop:?}");
    assert_eq!(guest.context.xstate.0[xstate::MXCSR..][..2], [0x84, 0x1d]);
}

/// Prints the time per guest instruction (run with `--nocapture`). The bound only catches a
/// breakdown: 200 ns is a guess, far above what an unloaded machine needs.
#[test]
fn speed_of_an_integer_loop() {
    let mut guest = Guest::new(|a| {
        let mut head = a.create_label();
        a.mov(ecx, 2_000_000)?;
        a.set_label(&mut head)?;
        a.mov(rax, qword_ptr(rsp - 8))?;
        a.lea(rdx, ptr(rax + rax * 2 + 1))?;
        a.xor(rdx, rsi)?;
        a.shr(rdx, 3)?;
        a.add(rsi, rdx)?;
        a.mov(qword_ptr(rsp - 16), rsi)?;
        a.cmp(rsi, rbx)?;
        a.cmove(rdi, rsi)?;
        a.sub(ecx, 1)?;
        a.jne(head)?;
        a.syscall()
    });
    let start = Instant::now();
    assert_eq!(guest.run(), Stop::Syscall);
    let per_instruction = start.elapsed().as_nanos() as f64 / 20e6;
    println!("{per_instruction:.2} ns per guest instruction");
    assert!(per_instruction < 200.0);
}
