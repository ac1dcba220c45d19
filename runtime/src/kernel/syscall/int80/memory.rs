//! 32-bit calls about mappings and about the limit of the address space, which [`System`] emulates.
//!
//! The kernel places mappings of 32-bit calls below 4 GiB, where 32-bit arguments reach them. The
//! 64-bit calls that are made instead may place them anywhere. So each gets MAP_32BIT, which
//! means the lowest 2 GiB, or a range that was reserved there before.
//!
//! No data; the functions run on the guest's thread and take the locks of the 64-bit calls only.
//!
//! Example: `mremap` of a page that cannot grow in place reserves a low range and moves the page
//! there (MREMAP_FIXED).

use dynasour_guest::ThreadContext;

use super::super::segments::segment_size;
use super::files::handlers;
use super::{done, word, words, write_words};
use crate::kernel::entry::Call;
use crate::kernel::process::{Done, Engine, System};

/// The end of the addresses that MAP_32BIT may choose (manual: mmap(2), "first 2 gigabytes").
const LOW_END: u64 = 1 << 31;
/// The value that the old `getrlimit` (76) returns for larger limits (asm/resource.h).
const OLD_INFINITY: u32 = 0x7fff_ffff;
/// The value that `ugetrlimit` (191) returns for larger limits (asm/resource.h).
const INFINITY: u32 = u32::MAX;
/// The function of `ipc` that is `shmat` (linux/ipc.h).
const IPC_SHMAT: u64 = 21;
/// The function of `ipc` that is `shmdt` (linux/ipc.h).
const IPC_SHMDT: u64 = 22;

/// The address that a call has returned, if it has not failed.
fn address(done: Done) -> Option<u64> {
    match done {
        Done::Value(value) if !(-4095..0).contains(&value) => Some(value as u64),
        _ => None,
    }
}

impl System {
    /// Reserves `len` bytes below 2 GiB. `Err`: how the `mmap` ended without success.
    fn reserve_low(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        len: u64,
    ) -> Result<u64, Done> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_32BIT;
        let none = libc::PROT_NONE as u64;
        let args = [0, len, none, flags as u64, u64::MAX, 0];
        let done = self.perform_64(context, engine, libc::SYS_mmap, &args);
        address(done).ok_or(done)
    }

    /// Reserves `len` bytes below 2 GiB and makes the call that `call` returns for their address.
    /// If the call fails, the range is freed.
    fn in_low_range(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        len: u64,
        call: impl FnOnce(u64) -> Call,
    ) -> Done {
        let low = match self.reserve_low(context, engine, len) {
            Ok(low) => low,
            Err(done) => return done,
        };
        let done = self.perform_writing(context, engine, &call(low));
        if address(done).is_none() {
            // The result is that of the call. If `munmap` fails, too, an unused reservation stays.
            self.perform_64(context, engine, libc::SYS_munmap, &[low, len]);
        }
        done
    }

    /// `mmap` with its arguments; the last is the offset in bytes.
    fn mmap_low(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        args: [u64; 6],
    ) -> Done {
        let [hint, len, prot, flags, ..] = args;
        let (prot, kind) = (prot as i32, flags as i32);
        let mut call = Call::new(libc::SYS_mmap, &args);
        if kind & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
            return self.perform_writing(context, engine, &call);
        }
        if hint.saturating_add(len) > LOW_END && hint != 0 {
            // MAP_32BIT ignores a hint above 2 GiB, so the call is tried with a fixed address.
            call.args[3] = flags | libc::MAP_FIXED_NOREPLACE as u64;
            call.args[0] &= !0xfff;
            let done = self.perform_writing(context, engine, &call);
            if address(done).is_some() || done == Done::Restart {
                return done;
            }
            call.args[0] = 0;
        }
        // The emulated `mmap` would choose an address near the code cache for a file with code.
        let is_code = prot & libc::PROT_EXEC != 0 || kind & libc::MAP_DENYWRITE != 0;
        if is_code && kind & libc::MAP_ANONYMOUS == 0 && call.args[0] == 0 && len != 0 {
            return self.in_low_range(context, engine, len, |low| {
                call.args[0] = low;
                call.args[3] = flags | libc::MAP_FIXED as u64;
                call
            });
        }
        call.args[3] = flags | libc::MAP_32BIT as u64;
        self.perform_writing(context, engine, &call)
    }

    /// `shmat`
    fn shmat_low(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        [id, at, flags]: [u64; 3],
    ) -> Done {
        let size = if at == 0 { segment_size(id).ok() } else { None };
        match size {
            // The guest names the address, or there is no such segment and the call will fail.
            None => self.perform_64(context, engine, libc::SYS_shmat, &[id, at, flags]),
            Some(size) => self.in_low_range(context, engine, size, |low| {
                Call::new(libc::SYS_shmat, &[id, low, flags | libc::SHM_REMAP as u64])
            }),
        }
    }

    /// `getrlimit`; limits above `most` become `most`.
    fn getrlimit_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
        most: u32,
    ) -> Done {
        let [resource, out, ..] = call.args;
        if resource as u32 != libc::RLIMIT_AS {
            return self.pass_32(engine, call);
        }
        let mut limit = [0u64; 2];
        let args = [resource, limit.as_mut_ptr() as u64];
        let done = self.perform_64(context, engine, libc::SYS_getrlimit, &args);
        if done != Done::Value(0) {
            return done;
        }
        let limit = limit.map(|word| u32::try_from(word).map_or(most, |word| word.min(most)));
        write_words(out, &limit).map_or_else(Done::error, |()| done)
    }
}

handlers! {
    mmap: |system, context, engine, call| done(words::<6>(call.args[0]).and_then(|args| {
        let args = args.map(u64::from);
        if args[5] & 0xfff != 0 {
            return Err(libc::EINVAL);
        }
        Ok(system.mmap_low(context, engine, args))
    }));
    mmap2: |system, context, engine, call| {
        let [a, b, c, d, e, f] = call.args;
        system.mmap_low(context, engine, [a, b, c, d, e, f << 12])
    };
    mremap: |system, context, engine, call| {
        let [at, len, new_len, flags, ..] = call.args;
        let moves = flags as i32 & libc::MREMAP_MAYMOVE != 0;
        if !moves || flags as i32 & libc::MREMAP_FIXED != 0 || new_len == 0 {
            return system.perform_64(context, engine, libc::SYS_mremap, &call.args);
        }
        if flags as i32 & libc::MREMAP_DONTUNMAP == 0 && len != 0 {
            let stays = [at, len, new_len, flags & !(libc::MREMAP_MAYMOVE as u64)];
            let done = system.perform_64(context, engine, libc::SYS_mremap, &stays);
            if done != Done::error(libc::ENOMEM) {
                return done;
            }
        }
        system.in_low_range(context, engine, new_len, |low| {
            let flags = flags | libc::MREMAP_FIXED as u64;
            Call::new(libc::SYS_mremap, &[at, len, new_len, flags, low])
        })
    };
    shmat: |system, context, engine, call| {
        let [id, at, flags, ..] = call.args;
        system.shmat_low(context, engine, [id, at, flags])
    };
    ipc: |system, context, engine, call| {
        let [function, id, flags, out, at, _] = call.args;
        match (function & 0xffff, function >> 16) {
            (IPC_SHMAT, 1) => Done::error(libc::EINVAL),
            (IPC_SHMAT, _) => {
                let done = system.shmat_low(context, engine, [id, at, flags]);
                match address(done) {
                    Some(address) => write_words(out, &[address as u32])
                        .map_or_else(Done::error, |()| Done::Value(0)),
                    None => done,
                }
            }
            (IPC_SHMDT, _) => system.perform_64(context, engine, libc::SYS_shmdt, &[at]),
            _ => system.pass_32(engine, call),
        }
    };
    getrlimit: |system, context, engine, call| {
        system.getrlimit_32(context, engine, call, OLD_INFINITY)
    };
    ugetrlimit: |system, context, engine, call| {
        system.getrlimit_32(context, engine, call, INFINITY)
    };
    setrlimit: |system, context, engine, call| {
        let [resource, new, ..] = call.args;
        if resource as u32 != libc::RLIMIT_AS {
            return system.pass_32(engine, call);
        }
        done(word(new).and_then(|soft| Ok([soft, word(new + 4)?])).map(|limit| {
            let limit = limit.map(|word| match word {
                INFINITY => libc::RLIM_INFINITY,
                word => word.into(),
            });
            let args = [resource, limit.as_ptr() as u64];
            system.perform_64(context, engine, libc::SYS_setrlimit, &args)
        }))
    };
}
