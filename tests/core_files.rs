//! A core file shows the guest: its registers, how the signal was sent, its own code.
//!
//! The same guest crashes natively and in each tier, in a loop with known registers; under `direct` in
//! a loop that is patched.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use dynasour_testkit::run::{Invocation, Status};
use dynasour_testkit::scratch;

/// `work` counts `n` rounds and reads a word from `from` in each. Arguments: `fault` (the last round
/// reads address 16), `abort`.
const GUEST: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
unsigned long work(const void *from, long n, const void *last);
__asm__(".p2align 12; .globl work; work:"
        "mov $0x1111, %ebx; mov $0x2222, %ebp; mov $0x3333, %r8d; mov $0x4444, %r9d;"
        "mov $0x5555, %r10d; mov $0x6666, %r11d; mov $0x7777, %r12d; mov $0x8888, %r13d;"
        "mov $0x9999, %r14d; mov $0xaaaa, %r15d; mov $0x123456789abcdef, %rax; movq %rax, %xmm3;"
        "xor %ecx, %ecx; xor %eax, %eax;"
        "1: inc %rcx; cmp %rsi, %rcx; cmove %rdx, %rdi; add (%rdi), %rax; cmp %rsi, %rcx; jne 1b;"
        "ret; .p2align 12; end_of_work:");
static const unsigned long word = 3;
static unsigned long call(long n, const void *last) {
    unsigned long sum;
    __asm__ volatile("push %%rbp; call work; pop %%rbp"
                     : "=a"(sum) : "D"(&word), "S"(n), "d"(last)
                     : "rbx", "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm3", "memory");
    return sum;
}
int main(int argc, char **argv) {
    for (int i = 0; i < 100; i++) {
        if (call(1000, &word) != 3000) return 1;
        getppid();
    }
    if (argc > 1 && strcmp(argv[1], "abort") == 0) abort();
    call(5000, (void *)16);
    return 2;
}
"#;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// What is compared of a core file.
#[derive(PartialEq, Debug)]
struct Core {
    /// As `struct user_regs_struct` has them, without those that depend on where the stack is, and
    /// without `orig_rax`.
    registers: Vec<u64>,
    xmm3: u64,
    /// The signal, its code, and the address of a fault.
    signal: (u32, u32, u64),
}

impl Core {
    /// The program headers of an ELF file: type, offset, address, size in the file.
    fn headers(file: &[u8]) -> Vec<(u32, usize, u64, usize)> {
        let (start, count) = (word(file, 32) as usize, usize::from(half(file, 56) as u16));
        let header = |n| &file[start + 56 * n..][..56];
        (0..count)
            .map(header)
            .map(|h| (half(h, 0), word(h, 8) as usize, word(h, 16), word(h, 32) as usize))
            .collect()
    }

    /// The notes of the core file, of the thread that has died first.
    fn note(file: &[u8], wanted: u32) -> &[u8] {
        const PT_NOTE: u32 = 4;
        let headers = Core::headers(file);
        let (_, offset, _, size) = *headers.iter().find(|h| h.0 == PT_NOTE).expect("notes");
        let mut notes = &file[offset..offset + size];
        loop {
            let (name, len) = (half(notes, 0) as usize, half(notes, 4) as usize);
            let start = 12 + name.next_multiple_of(4);
            if half(notes, 8) == wanted {
                return &notes[start..start + len];
            }
            notes = &notes[start + len.next_multiple_of(4)..];
        }
    }

    fn of(file: &[u8]) -> Core {
        const NT_PRSTATUS: u32 = 1;
        const NT_FPREGSET: u32 = 2;
        const NT_SIGINFO: u32 = 0x5349_4749;
        /// rsp and, in a library, rip and rbp are addresses that differ.
        const REGISTERS: [usize; 15] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 18];
        let general = &Core::note(file, NT_PRSTATUS)[112..];
        let info = Core::note(file, NT_SIGINFO);
        Core {
            registers: REGISTERS.map(|n| word(general, 8 * n)).to_vec(),
            xmm3: word(Core::note(file, NT_FPREGSET), 160 + 3 * 16),
            signal: (half(info, 0), half(info, 8), word(info, 16)),
        }
    }

    /// The bytes of memory at `address`, if the file has them.
    fn memory(file: &[u8], address: u64, len: usize) -> Option<&[u8]> {
        const PT_LOAD: u32 = 1;
        Core::headers(file).into_iter().find_map(|(kind, offset, start, size)| {
            let at = usize::try_from(address.checked_sub(start)?).ok()?;
            (kind == PT_LOAD && at + len <= size).then(|| &file[offset + at..][..len])
        })
    }
}

fn build(directory: &Path) -> PathBuf {
    let (source, program) = (directory.join("guest.c"), directory.join("guest"));
    fs::write(&source, GUEST).expect("a scratch file");
    let built = Command::new("cc")
        .args(["-O1", "-static", "-no-pie", "-o"])
        .args([&program, &source])
        .status()
        .expect("cc runs");
    assert!(built.success(), "the guest does not build");
    program
}

/// Where `work` is, by nm.
fn address_of_work(program: &Path) -> u64 {
    let nm = Command::new("nm").arg(program).output().expect("nm runs");
    let names = String::from_utf8_lossy(&nm.stdout).into_owned();
    let line = names.lines().find(|line| line.ends_with(" T work")).expect("the function");
    u64::from_str_radix(&line[..16], 16).expect("an address")
}

/// The core file of a run in a fresh directory.
fn core_of(directory: &Path, command: &[&str], signal: i32) -> (Vec<u8>, String) {
    let directory = directory.join("run");
    scratch::fresh(&directory).expect("a scratch directory");
    let outcome = Invocation::new("sh", &directory)
        .args(["-c", "ulimit -c unlimited && exec \"$@\"", "sh"])
        .args(command)
        .run();
    assert_eq!(outcome.status, Status::Killed(signal), "{}", outcome.excerpt());
    let files = fs::read_dir(&directory).expect("the directory").flatten();
    let core = files.map(|file| file.path()).find(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"core"))
    });
    let core = fs::read(core.expect("a core file")).expect("it can be read");
    (core, String::from_utf8_lossy(&outcome.stderr).into_owned())
}

#[test]
fn a_core_file_is_the_guests() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").expect("procfs");
    if !pattern.starts_with("core") || pattern.contains('/') {
        println!("not tried: this system's core files go to {pattern}");
        return;
    }
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("core_files");
    scratch::fresh(&directory).expect("a scratch directory");
    let program = build(&directory);
    let guest = program.to_str().expect("a path in UTF-8");
    let work = address_of_work(&program);
    let (native, _) = core_of(&directory, &[guest], libc::SIGSEGV);
    let (aborted, _) = core_of(&directory, &[guest, "abort"], libc::SIGABRT);
    let native = Core::of(&native);
    assert_eq!((native.signal, native.xmm3), ((11, 1, 16), 0x0123_4567_89ab_cdef));
    let modes: [&[&str]; 6] = [
        &["interp"],
        &["copy"],
        &["dynamo", "--threshold", "10"],
        &["full", "--threshold", "10"],
        &["direct", "--no-traces"],
        &["direct", "--sample", "every=1", "--threshold", "3", "--stats"],
    ];
    for mode in modes {
        let mut command = vec![env!("CARGO_BIN_EXE_dynasour"), "run", "--tier"];
        command.extend(mode);
        command.extend(["--", guest]);
        let (core, stderr) = core_of(&directory, &command, libc::SIGSEGV);
        assert_eq!(Core::of(&core), native, "{mode:?}");
        if mode.contains(&"--stats") {
            let line = stderr.lines().find(|line| line.contains("patches in guest code"));
            let patches = line.expect("a report").split_whitespace().last().expect("a number");
            assert_ne!(patches, "0", "{stderr}");
            let code = fs::read(&program).expect("the program");
            let own = Core::memory(&code, work, 128).expect("the function");
            assert_eq!(Core::memory(&core, work, 128), Some(own), "its own code");
        }
        command.push("abort");
        let (core, _) = core_of(&directory, &command, libc::SIGABRT);
        let (own, native) = (Core::of(&core), Core::of(&aborted));
        assert_eq!((own.signal.0, own.signal.1), (native.signal.0, native.signal.1), "{mode:?}");
        // rip, rax and the flags at the end of the call.
        assert_eq!(own.registers[10..], native.registers[10..], "{mode:?}");
    }
}
