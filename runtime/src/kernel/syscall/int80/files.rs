//! 32-bit calls about files that the translator treats specially: `/proc/self/exe` and
//! `/proc/self/maps`, files from which code was translated, and the guest's memory as a file.
//!
//! No data; the functions run on the guest's thread without locks. Every call that does not concern
//! such a file goes to the kernel unchanged. The macro [`handlers`] declares the handlers of these
//! calls, here and in the neighbouring modules.
//!
//! Example: `stat("/proc/self/exe")` opens the guest's executable with O_PATH, makes `fstat` with
//! the guest's buffer and closes the descriptor.

use dynasour_guest::ThreadContext;
use dynasour_guest::space::USER_END;

use crate::kernel::entry::{self, Call};
use crate::kernel::process::own_files::own_file_at;
use crate::kernel::process::{Done, Engine, System};

// Numbers of the i386 table.
const OLDFSTAT: u64 = 28;
const FSTAT: u64 = 108;
const FSTAT64: u64 = 197;

impl System {
    /// Opens a path. If it leads to `/proc/self/exe` or `/proc/self/maps`, the 64-bit call `same`
    /// is made, which opens the guest's version. The last argument has the index of the path among
    /// the call's arguments and the flags of the open.
    fn open_32(
        &mut self,
        context: &mut ThreadContext,
        engine: &mut dyn Engine,
        call: &Call,
        same: i64,
        (path, flags): (usize, i32),
    ) -> Done {
        let directory = if path == 0 { libc::AT_FDCWD } else { call.args[0] as i32 };
        if own_file_at(directory, call.args[path], false).is_some() {
            return self.perform_64(context, engine, same, &call.args);
        }
        let done = self.pass_32(engine, call);
        self.opened_file(engine, done, flags)
    }

    /// Makes a `stat` call. If the path leads to `/proc/self/exe` or that of another guest, the call with the 32-bit
    /// number `fstat` is made on the guest's executable instead.
    fn stat_32(
        &mut self,
        engine: &mut dyn Engine,
        call: &Call,
        fstat: u64,
        (directory, path, buffer): (i32, u64, u64),
    ) -> Done {
        let own = own_file_at(directory, path, false);
        let Some(executable) = own.and_then(|own| own.executable(self.process.executable())) else {
            return self.pass_32(engine, call);
        };
        let flags = (libc::O_PATH | libc::O_CLOEXEC) as u64;
        let open = Call::new(libc::SYS_open, &[executable.as_ptr() as u64, flags]);
        // SAFETY: makes a descriptor, which is closed below.
        let fd = unsafe { entry::raw(&open) };
        if fd < 0 {
            return Done::Value(fd);
        }
        let args = [fd as u64, buffer, 0, 0, 0, 0];
        let done = self.pass_32(engine, &Call { nr: fstat, args });
        // SAFETY: the descriptor is ours.
        unsafe { entry::raw(&Call::new(libc::SYS_close, &[fd as u64])) };
        done
    }

    /// A write of several buffers. If the guest has opened its memory as a file for writing, all
    /// translated code is dropped, because the written range is not computed here.
    fn write_vectors_32(&mut self, engine: &mut dyn Engine, call: &Call) -> Done {
        let done = self.pass_32(engine, call);
        if self.process.pages().is_written_as_file() && matches!(done, Done::Value(1..)) {
            self.process.pages().changed(engine, std::iter::once(0..USER_END));
        }
        done
    }
}

/// Declares functions of the type `Handler` of [`super::table`], each with names for its arguments.
macro_rules! handlers {
    ($($name:ident: |$system:ident, $context:ident, $engine:ident, $call:ident| $body:expr;)*) => {
        $(
            pub(super) fn $name(
                $system: &mut System,
                $context: &mut ThreadContext,
                $engine: &mut dyn Engine,
                $call: &Call,
            ) -> Done {
                $body
            }
        )*
    };
}
pub(super) use handlers;

handlers! {
    open: |system, context, engine, call| {
        let path_and_flags = (0, call.args[1] as i32);
        system.open_32(context, engine, call, libc::SYS_open, path_and_flags)
    };
    openat: |system, context, engine, call| {
        let path_and_flags = (1, call.args[2] as i32);
        system.open_32(context, engine, call, libc::SYS_openat, path_and_flags)
    };
    openat2: |system, context, engine, call| {
        // The flags are in a structure that is not read here: assume that the file is written.
        system.open_32(context, engine, call, libc::SYS_openat2, (1, libc::O_RDWR))
    };
    oldstat: |system, _context, engine, call| {
        let [path, buffer, ..] = call.args;
        system.stat_32(engine, call, OLDFSTAT, (libc::AT_FDCWD, path, buffer))
    };
    stat: |system, _context, engine, call| {
        let [path, buffer, ..] = call.args;
        system.stat_32(engine, call, FSTAT, (libc::AT_FDCWD, path, buffer))
    };
    stat64: |system, _context, engine, call| {
        let [path, buffer, ..] = call.args;
        system.stat_32(engine, call, FSTAT64, (libc::AT_FDCWD, path, buffer))
    };
    fstatat64: |system, _context, engine, call| {
        let [directory, path, buffer, flags, ..] = call.args;
        if flags as i32 & libc::AT_SYMLINK_NOFOLLOW != 0 {
            return system.pass_32(engine, call);
        }
        system.stat_32(engine, call, FSTAT64, (directory as i32, path, buffer))
    };
    pwrite64: |system, context, engine, call| {
        let [fd, buffer, count, low, high, _] = call.args;
        let at = low | high << 32;
        system.perform_64(context, engine, libc::SYS_pwrite64, &[fd, buffer, count, at])
    };
    writev: |system, _context, engine, call| system.write_vectors_32(engine, call);
    pwritev: |system, _context, engine, call| system.write_vectors_32(engine, call);
    pwritev2: |system, _context, engine, call| system.write_vectors_32(engine, call);
    io_setup: |system, _context, engine, call| {
        let done = system.pass_32(engine, call);
        engine.private_memory_lost();
        done
    };
    io_uring_setup: |system, _context, engine, call| {
        let done = system.pass_32(engine, call);
        engine.private_memory_lost();
        done
    };
}
