//! The file of the translator, which runs the programs that the guest executes ([`super::exec`]).
//!
//! The link `/proc/self/exe` always leads to it, but the kernel makes two inodes for the link in each new process,
//! which takes 45 µs (measured; a twentieth of what a short command of a shell takes). So the path that the list of
//! mappings named at the start is used, if it still leads to the same file.
//!
//! Data: [`Translator`], part of [`super::exec::Follow`], which does not change while guests run. No lock.
//!
//! Example: `/usr/bin/dynasour` is mapped from device fe:0, inode 247. At an execve, `stat` says the same of that path, and
//! `/proc` is there: the kernel is to execute `/usr/bin/dynasour`. After a `chroot` the path leads nowhere: the kernel
//! is to execute `/proc/self/exe`.

use dynasour_guest::space::MapEntry;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;

/// The link to the program of a process.
const OWN: &CStr = c"/proc/self/exe";

/// How the kernel finds the translator.
#[derive(Debug)]
pub struct Translator {
    /// A path that leads there at any time.
    path: CString,
    /// A path that is found faster.
    named: Option<Named>,
}

/// A path of the file of which this process's code is mapped.
#[derive(Debug)]
struct Named {
    path: CString,
    device: (u32, u32),
    inode: u64,
}

impl Translator {
    /// The program of this process.
    pub fn own() -> Translator {
        Translator::at(OWN.to_owned())
    }

    /// The file at `path`.
    pub fn at(path: CString) -> Translator {
        Translator { path, named: None }
    }

    /// The list of this process's mappings names its program.
    pub(crate) fn found(&mut self, maps: &[MapEntry]) {
        let code = Translator::own as *const () as u64;
        let map = maps.iter().find(|map| map.range.contains(&code));
        self.named = map.filter(|_| self.path.as_c_str() == OWN).and_then(|map| {
            let path = CString::new(map.path.as_ref()?.as_bytes()).ok()?;
            Some(Named { path, device: map.device, inode: map.inode })
        });
    }

    /// A path that leads there now.
    pub(crate) fn path(&self) -> &CStr {
        let named = self.named.as_ref().filter(|named| named.is_there() && has_proc());
        named.map_or(&self.path, |named| &named.path)
    }
}

impl Named {
    /// Does the path lead to the file? On some file systems (btrfs) `stat` names another device than the list of
    /// mappings, and no path leads there.
    fn is_there(&self) -> bool {
        let mut file = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: fills `file` in, or fails.
        let file = unsafe {
            let failed = libc::stat(self.path.as_ptr(), file.as_mut_ptr());
            (failed == 0).then(|| file.assume_init())
        };
        file.is_some_and(|file| {
            let device = (libc::major(file.st_dev), libc::minor(file.st_dev));
            (device, file.st_ino) == (self.device, self.inode)
        })
    }
}

/// Is there a `/proc`? The translator does not start without.
fn has_proc() -> bool {
    let mut system = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fills `system` in, or fails.
    unsafe {
        libc::statfs(c"/proc".as_ptr(), system.as_mut_ptr()) == 0
            && system.assume_init().f_type == libc::PROC_SUPER_MAGIC
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::in_child;
    use dynasour_guest::space;
    use std::ffi::OsStr;
    use std::path::Path;

    #[test]
    fn the_program_is_found_by_its_path_while_that_leads_there() {
        let maps = space::maps().expect("maps");
        let own = std::env::current_exe().expect("a path");
        let mut translator = Translator::own();
        assert_eq!(translator.path(), c"/proc/self/exe");
        translator.found(&maps);
        let path = Path::new(OsStr::from_bytes(translator.path().to_bytes()));
        assert!(path == own || path == Path::new("/proc/self/exe"), "{path:?}");

        let named = translator.named.as_mut().expect("no overlay");
        named.inode += 1;
        assert_eq!(translator.path(), c"/proc/self/exe", "another file");
    }

    #[test]
    fn another_translator_has_its_own_path() {
        let mut translator = Translator::at(c"/usr/bin/dynasour".to_owned());
        translator.found(&space::maps().expect("maps"));
        assert_eq!(translator.path(), c"/usr/bin/dynasour");
    }

    #[test]
    fn without_proc_the_link_is_left_to_the_kernel() {
        let status = in_child(|| {
            let mut translator = Translator::own();
            translator.found(&space::maps().expect("maps"));
            // SAFETY: it concerns this child only.
            if unsafe { libc::chroot(c"/dev".as_ptr()) } != 0 {
                // Only the superuser may.
                return 0;
            }
            i32::from(translator.path() != c"/proc/self/exe")
        });
        assert_eq!(status, 0);
    }
}
