//! 32-bit calls about processes, threads, programs and filters, which [`System`] emulates.
//!
//! Each function copies the guest's arrays and structures of 32-bit words into 64-bit ones in host
//! memory, and makes the 64-bit call with the copies.
//!
//! No data; the functions run on the guest's thread and take the locks of the 64-bit calls only.
//!
//! Example: `execve` copies the 32-bit pointers of `argv` and `envp` into arrays of 64-bit ones.

use dynasour_guest::ThreadContext;

use super::files::handlers;
use super::{done, refuse, word};
use crate::kernel::entry::Call;
use crate::kernel::process::guest_access::guest_read;
use crate::kernel::process::{Done, Engine, System};
use crate::kernel::syscall::tracing::Stop;

/// The flag of `clone` that gives the child a thread area.
const CLONE_SETTLS: u64 = 0x0008_0000;
/// Why [`CLONE_SETTLS`] is refused.
const THREAD_AREA: &str = "a 32-bit thread area is a descriptor of a segment, which the translator \
                           does not have";
/// `linux/seccomp.h`: the operation of `seccomp` and the mode of `prctl` that have a program.
const SECCOMP_SET_MODE_FILTER: u64 = 1;
/// See [`SECCOMP_SET_MODE_FILTER`].
const SECCOMP_MODE_FILTER: u64 = 2;

/// The pointers in an array of 32-bit pointers that ends with a null pointer, which is included.
/// The error is an errno.
fn pointers(address: u64) -> Result<Vec<u64>, i32> {
    /// The longest array in pointers (guess). A longer array fails with E2BIG, although the kernel
    /// would accept it if the guest's stack limit is large.
    const MOST: usize = 1 << 17;
    let mut pointers = Vec::new();
    if address == 0 {
        return Ok(vec![0]);
    }
    loop {
        match word(address + 4 * pointers.len() as u64)? {
            0 => break,
            _ if pointers.len() == MOST => return Err(libc::E2BIG),
            pointer => pointers.push(pointer.into()),
        }
    }
    pointers.push(0);
    Ok(pointers)
}

/// Converts a 32-bit `struct sock_fprog` (a 16-bit length, a pointer in the second word) to the
/// words of a 64-bit one. The error is an errno.
fn program(address: u64) -> Result<[u64; 2], i32> {
    let length = u16::from_le_bytes(guest_read(address)?);
    Ok([length.into(), word(address + 4)?.into()])
}

handlers! {
    clone: |system, context, engine, call| {
        let [flags, stack, parent_tid, _, child_tid, _] = call.args;
        if flags & CLONE_SETTLS != 0 {
            return refuse(call.nr as u32, "clone with CLONE_SETTLS", THREAD_AREA);
        }
        let args = [flags, stack, parent_tid, child_tid];
        system.perform_64(context, engine, libc::SYS_clone, &args)
    };
    clone3: |system, context, engine, call| {
        // If the flags cannot be read, the call fails with EFAULT.
        if word(call.args[0]).is_ok_and(|flags| u64::from(flags) & CLONE_SETTLS != 0) {
            return refuse(call.nr as u32, "clone3 with CLONE_SETTLS", THREAD_AREA);
        }
        system.perform_64(context, engine, libc::SYS_clone3, &call.args)
    };
    execve: |system, context, engine, call| {
        let [path, argv, envp, ..] = call.args;
        done(pointers(argv).and_then(|argv| Ok((argv, pointers(envp)?))).map(|(argv, envp)| {
            let args = [path, argv.as_ptr() as u64, envp.as_ptr() as u64];
            system.perform_64(context, engine, libc::SYS_execve, &args)
        }))
    };
    execveat: |system, context, engine, call| {
        let [directory, path, argv, envp, flags, _] = call.args;
        done(pointers(argv).and_then(|argv| Ok((argv, pointers(envp)?))).map(|(argv, envp)| {
            let args = [directory, path, argv.as_ptr() as u64, envp.as_ptr() as u64, flags];
            system.perform_64(context, engine, libc::SYS_execveat, &args)
        }))
    };
    seccomp: |system, context, engine, call| {
        let [operation, flags, fprog, ..] = call.args;
        if operation != SECCOMP_SET_MODE_FILTER {
            return system.perform_64(context, engine, libc::SYS_seccomp, &call.args);
        }
        done(program(fprog).map(|program| {
            let args = [operation, flags, program.as_ptr() as u64];
            system.perform_64(context, engine, libc::SYS_seccomp, &args)
        }))
    };
    prctl: |system, context, engine, call| {
        let [option, mode, fprog, ..] = call.args;
        if option as i32 != libc::PR_SET_SECCOMP || mode != SECCOMP_MODE_FILTER {
            return system.perform_64(context, engine, libc::SYS_prctl, &call.args);
        }
        done(program(fprog).map(|program| {
            let args = [option, mode, program.as_ptr() as u64];
            system.perform_64(context, engine, libc::SYS_prctl, &args)
        }))
    };
    arch_prctl: |system, context, engine, call| {
        /// The codes that 32-bit calls may use (asm/prctl.h): faults of `cpuid`, and components of
        /// the extended state. The kernel refuses codes about segment bases with EINVAL.
        const COMMON: [u64; 7] = [0x1011, 0x1012, 0x1021, 0x1022, 0x1023, 0x1024, 0x1025];
        match COMMON.contains(&call.args[0]) {
            true => system.perform_64(context, engine, libc::SYS_arch_prctl, &call.args),
            false => Done::error(libc::EINVAL),
        }
    };
    ptrace: |system, context, engine, call| {
        if Stop::of(call.args[0]).is_some() {
            return system.perform_64(context, engine, libc::SYS_ptrace, &call.args);
        }
        let is_general = [libc::PTRACE_GETREGS, libc::PTRACE_GETREGSET]
            .contains(&(call.args[0] as libc::c_uint));
        if is_general && system.process.shares_memory() {
            let reason = "registers of a process that shares memory are only read by 64-bit calls";
            return refuse(call.nr as u32, "ptrace", reason);
        }
        system.pass_32(engine, call)
    };
}
