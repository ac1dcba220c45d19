//! Executes one instruction on the processor, with every register, the flags and scratch memory
//! under control.
//!
//! *Layout.* All of it lies in the low 2 GiB, so that the thunk reaches its state by absolute
//! addresses and needs no register. The instruction under test stands at [`SLOT`]. Control that
//! goes on behind it, or to [`Arena::taken`], returns to the thunk.
//!
//! *Signals.* A signal that the instruction raises is caught by generated code, because FS holds
//! the guest's base then and Rust code needs thread-local storage. The handler resumes at the
//! thunk's end.
//!
//! *Access.* One arena for the whole process; [`arena`] locks it for one test at a time.

use iced_x86::code_asm::*;
use std::sync::{LazyLock, Mutex, MutexGuard};

/// Registers, flags and segment bases.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Registers {
    pub gpr: [u64; 16],
    pub flags: u64,
}

/// Bytes of an XSAVE area with x87, SSE, AVX and AVX-512.
pub const XSAVE_BYTES: usize = 4096;

/// An XSAVE area.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Extended(pub [u8; XSAVE_BYTES]);

#[repr(C, align(64))]
struct Shared {
    vector_in: Extended,
    vector_out: Extended,
    input: Registers,
    output: Registers,
    fs_base: u64,
    gs_base: u64,
    host_rsp: u64,
    host_fs: u64,
    host_gs: u64,
    /// Nonzero if the extended state is to be saved after the instruction.
    save_vectors: u64,
    default_mxcsr: u64,
    /// How the instruction ended, see [`End`].
    end: u64,
}

/// How an executed instruction ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// At the next instruction.
    Next,
    /// At [`Arena::taken`].
    Taken,
    /// With this signal.
    Signal(i32),
}

const CODE: usize = 0;
const SLOT: usize = 0x3400;
const TAKEN: usize = SLOT + 0x50;
const SHARED: usize = 0x8000;
const SCRATCH: usize = 0x1_0000;
const STACK: usize = 0x1_8000;
const SIZE: usize = 0x2_8000;
const GUARD_BYTES: usize = 0x4000;
const GUARD_BELOW: usize = SCRATCH - GUARD_BYTES;
const _: () = assert!(SHARED + size_of::<Shared>() <= GUARD_BELOW);

/// Bytes of scratch memory.
pub const SCRATCH_BYTES: usize = 4096;

const END_NEXT: u32 = 0x100;
const END_TAKEN: u32 = 0x101;

/// The XSAVE components used: x87, SSE, AVX, opmask, ZMM.
const COMPONENTS: u32 = 0xe7;

/// The one arena of the test process.
pub struct Arena {
    base: usize,
    plain: usize,
    with_vectors: usize,
    behind: usize,
    behind_taken: usize,
}

/// The arena, for one test at a time.
pub fn arena() -> MutexGuard<'static, Arena> {
    static ARENA: LazyLock<Mutex<Arena>> = LazyLock::new(|| Mutex::new(Arena::new()));
    let mut arena = ARENA.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    arena.use_signal_stack();
    arena.set_writable(true);
    arena
}

impl Arena {
    fn new() -> Arena {
        // SAFETY: a fresh anonymous mapping; nothing else refers to it.
        let base = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
            libc::mmap(std::ptr::null_mut(), SIZE, prot, flags, -1, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        let base = base as usize;
        assert!(base + SIZE < 1 << 31);
        let mut arena = Arena { base, plain: 0, with_vectors: 0, behind: 0, behind_taken: 0 };
        arena.shared().default_mxcsr = 0x1f80;
        for guard in [GUARD_BELOW, SCRATCH + SCRATCH_BYTES] {
            // SAFETY: pages of the mapping that nothing uses.
            let result = unsafe {
                libc::mprotect((base + guard) as *mut libc::c_void, GUARD_BYTES, libc::PROT_NONE)
            };
            assert_eq!(result, 0);
        }
        arena.generate().expect("the thunks can be encoded");
        arena
    }

    fn field(&self, offset: usize) -> u64 {
        (self.base + SHARED + offset) as u64
    }

    fn shared(&mut self) -> &mut Shared {
        // SAFETY: the mapping is aligned, large enough, lives as long as the process, and is
        // reached only through the locked arena; `Shared` is plain data.
        unsafe { &mut *((self.base + SHARED) as *mut Shared) }
    }

    fn generate(&mut self) -> Result<(), IcedError> {
        use std::mem::offset_of;
        const GPRS: [AsmRegister64; 16] =
            [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15];
        let input = |i: usize| qword_ptr(self.field(offset_of!(Shared, input) + 8 * i));
        let output = |i: usize| qword_ptr(self.field(offset_of!(Shared, output) + 8 * i));
        let field = |offset| qword_ptr(self.field(offset));
        let slot = (self.base + SLOT) as u64;
        let callee_saved = [rbx, rbp, r12, r13, r14, r15];

        let mut a = CodeAssembler::new(64)?;
        let (mut plain, mut vectors) = (a.create_label(), a.create_label());
        let (mut next, mut taken, mut done) =
            (a.create_label(), a.create_label(), a.create_label());
        let mut handler = a.create_label();
        let mut no_vectors = a.create_label();

        a.set_label(&mut vectors)?;
        a.mov(eax, COMPONENTS)?;
        a.xor(edx, edx)?;
        a.xrstor64(ptr(self.field(offset_of!(Shared, vector_in))))?;
        a.set_label(&mut plain)?;
        for r in callee_saved {
            a.push(r)?;
        }
        a.pushfq()?;
        a.mov(field(offset_of!(Shared, host_rsp)), rsp)?;
        a.rdfsbase(rax)?;
        a.mov(field(offset_of!(Shared, host_fs)), rax)?;
        a.rdgsbase(rax)?;
        a.mov(field(offset_of!(Shared, host_gs)), rax)?;
        a.mov(rax, field(offset_of!(Shared, fs_base)))?;
        a.wrfsbase(rax)?;
        a.mov(rax, field(offset_of!(Shared, gs_base)))?;
        a.wrgsbase(rax)?;
        a.push(input(16))?;
        a.popfq()?;
        for (i, r) in GPRS.into_iter().enumerate() {
            a.mov(r, input(i))?;
        }
        a.jmp(slot)?;

        a.set_label(&mut next)?;
        a.mov(dword_ptr(self.field(offset_of!(Shared, end))), END_NEXT)?;
        a.jmp(done)?;
        a.set_label(&mut taken)?;
        a.mov(dword_ptr(self.field(offset_of!(Shared, end))), END_TAKEN)?;
        a.set_label(&mut done)?;
        for (i, r) in GPRS.into_iter().enumerate() {
            a.mov(output(i), r)?;
        }
        a.mov(rsp, field(offset_of!(Shared, host_rsp)))?;
        a.pushfq()?;
        a.pop(output(16))?;
        a.cld()?;
        a.cmp(qword_ptr(self.field(offset_of!(Shared, save_vectors))), 0)?;
        a.je(no_vectors)?;
        a.mov(eax, COMPONENTS)?;
        a.xor(edx, edx)?;
        a.xsave64(ptr(self.field(offset_of!(Shared, vector_out))))?;
        a.fninit()?;
        a.ldmxcsr(dword_ptr(self.field(offset_of!(Shared, default_mxcsr))))?;
        a.vzeroupper()?;
        a.set_label(&mut no_vectors)?;
        a.mov(rax, field(offset_of!(Shared, host_fs)))?;
        a.wrfsbase(rax)?;
        a.mov(rax, field(offset_of!(Shared, host_gs)))?;
        a.wrgsbase(rax)?;
        a.popfq()?;
        for r in callee_saved.into_iter().rev() {
            a.pop(r)?;
        }
        a.ret()?;

        // Signal handler: (signal, info, ucontext). The saved rip becomes `done`.
        a.set_label(&mut handler)?;
        a.mov(dword_ptr(self.field(offset_of!(Shared, end))), edi)?;
        a.lea(rax, qword_ptr(done))?;
        let rip = offset_of!(libc::ucontext_t, uc_mcontext.gregs) + 8 * libc::REG_RIP as usize;
        a.mov(qword_ptr(rdx + rip), rax)?;
        a.ret()?;

        let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
        let result = a.assemble_options((self.base + CODE) as u64, options)?;
        let address = |label: &CodeLabel| result.label_ip(label).map(|ip| ip as usize);
        let handler = address(&handler)?;
        self.plain = address(&plain)?;
        self.with_vectors = address(&vectors)?;
        self.behind = address(&next)?;
        self.behind_taken = address(&taken)?;
        assert!(result.inner.code_buffer.len() < SLOT);
        self.write_code(CODE, &result.inner.code_buffer);
        self.write_jump(TAKEN, self.behind_taken);
        catch_signals(handler);
        Ok(())
    }

    fn write_code(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= SHARED);
        // SAFETY: inside the mapping; no code runs there now.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (self.base + offset) as *mut u8,
                bytes.len(),
            )
        }
    }

    fn write_jump(&mut self, offset: usize, to: usize) {
        let mut bytes = [0xe9, 0, 0, 0, 0];
        let displacement = to as i64 - (self.base + offset + 5) as i64;
        bytes[1..].copy_from_slice(&(displacement as i32).to_le_bytes());
        self.write_code(offset, &bytes);
    }

    /// The registers under test may hold any value, rsp too, so signals need their own stack.
    fn use_signal_stack(&self) {
        let stack = libc::stack_t {
            ss_sp: (self.base + STACK) as *mut libc::c_void,
            ss_flags: 0,
            ss_size: SIZE - STACK,
        };
        // SAFETY: the memory is the arena's and stays mapped.
        let result = unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) };
        assert_eq!(result, 0);
    }

    /// Address of the instruction under test.
    pub fn slot(&self) -> u64 {
        (self.base + SLOT) as u64
    }

    /// The branch target from which control returns, besides the next instruction.
    pub fn taken(&self) -> u64 {
        (self.base + TAKEN) as u64
    }

    /// Address of the scratch memory.
    pub fn scratch(&self) -> u64 {
        (self.base + SCRATCH) as u64
    }

    /// Whether an access within 16 bytes of the address can reach only the scratch memory or the
    /// inaccessible pages around it.
    pub fn is_walled_in(&self, address: u64) -> bool {
        let inside = (self.base + GUARD_BELOW + 16) as u64
            ..(self.base + SCRATCH + SCRATCH_BYTES + GUARD_BYTES - 16) as u64;
        inside.contains(&address)
    }

    pub fn memory(&mut self) -> &mut [u8] {
        // SAFETY: inside the mapping, reached only through the locked arena.
        unsafe { std::slice::from_raw_parts_mut((self.base + SCRATCH) as *mut u8, SCRATCH_BYTES) }
    }

    /// Makes the scratch memory read-only or writable again.
    pub fn set_writable(&mut self, writable: bool) {
        let prot = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        // SAFETY: pages of the mapping; no reference to them exists during the call.
        let result = unsafe {
            libc::mprotect((self.base + SCRATCH) as *mut libc::c_void, SCRATCH_BYTES, prot)
        };
        assert_eq!(result, 0);
    }

    /// Installs the instruction under test.
    pub fn install(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= 15);
        self.write_code(SLOT, bytes);
        self.write_jump(SLOT + bytes.len(), self.behind);
    }

    fn enter(
        &mut self,
        thunk: usize,
        input: &Registers,
        fs_base: u64,
        gs_base: u64,
    ) -> (Registers, End) {
        let shared = self.shared();
        shared.input = *input;
        shared.fs_base = fs_base;
        shared.gs_base = gs_base;
        // SAFETY: `thunk` was generated above. It saves what the ABI asks for, and control returns
        // from the slot in each of the three ways (next, taken, signal).
        unsafe {
            let thunk: extern "C" fn() = std::mem::transmute(thunk);
            thunk();
        }
        let shared = self.shared();
        let end = match shared.end as u32 {
            END_NEXT => End::Next,
            END_TAKEN => End::Taken,
            signal => End::Signal(signal as i32),
        };
        (shared.output, end)
    }

    /// Executes the installed instruction.
    pub fn run(&mut self, input: &Registers, fs_base: u64, gs_base: u64) -> (Registers, End) {
        self.enter(self.plain, input, fs_base, gs_base)
    }

    /// Executes the installed instruction with `vectors` as extended state, which is replaced by
    /// what it leaves.
    pub fn run_with_vectors(
        &mut self,
        input: &Registers,
        vectors: &mut Extended,
        fs_base: u64,
        gs_base: u64,
    ) -> (Registers, End) {
        let shared = self.shared();
        shared.vector_in = *vectors;
        shared.save_vectors = 1;
        let result = self.enter(self.with_vectors, input, fs_base, gs_base);
        self.shared().save_vectors = 0;
        *vectors = self.shared().vector_out;
        result
    }
}

fn catch_signals(handler: usize) {
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
        // SAFETY: the handler is code of the arena, which lives as long as the process. A fault
        // outside the slot would end in the thunk's epilogue with a stale stack pointer; the tests'
        // Rust code has none.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
}
