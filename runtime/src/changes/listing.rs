//! `/proc/self/maps` as it would be without guards and hidden pages ([`super::hiding`]): guarded
//! pages are shown as writable, and lines that only guards or hiding have split are joined.
//!
//! A pure function of the kernel's text and these pages; no data, no lock.

use std::ops::Range;

use dynasour_guest::space::{self, PAGE};

/// One line, parsed; the columns behind the offset are kept as text.
struct MapPiece<'t> {
    range: Range<u64>,
    permissions: [u8; 4],
    offset: u64,
    rest: &'t [u8],
    /// Is it a guarded or hidden page?
    touched: bool,
}

impl MapPiece<'_> {
    fn continues(&self, before: &MapPiece) -> bool {
        let anonymous = self.rest.starts_with(b"00:00 0");
        let offset = before.offset + (before.range.end - before.range.start);
        before.range.end == self.range.start
            && before.permissions == self.permissions
            && before.rest == self.rest
            && (anonymous || offset == self.offset)
    }
}

/// `text`, with the pages at the addresses `guarded` and `hidden` shown as the guest mapped them.
pub fn without_guards(text: &[u8], guarded: &[u64], hidden: &[u64]) -> Vec<u8> {
    if guarded.is_empty() && hidden.is_empty() {
        return text.to_vec();
    }
    // A guarded page is writable, so none is hidden, too.
    let mut touched: Vec<(u64, bool)> = guarded.iter().map(|page| (*page, true)).collect();
    touched.extend(hidden.iter().map(|page| (*page, false)));
    touched.sort_unstable();
    let mut pieces: Vec<MapPiece> = Vec::new();
    for line in text.split(|&byte| byte == b'\n') {
        let mut columns = line.splitn(4, |&byte| byte == b' ');
        let (Some(entry), Some(rest)) = (space::parse_line(line), columns.nth(3)) else { continue };
        let Some(permissions) =
            line.split(|&byte| byte == b' ').nth(1).and_then(|p| p.first_chunk::<4>())
        else {
            continue;
        };
        let inside = &touched[touched.partition_point(|(page, _)| *page < entry.range.start)..];
        let inside = &inside[..inside.partition_point(|(page, _)| *page < entry.range.end)];
        let mut start = entry.range.start;
        while start < entry.range.end {
            let at = inside.partition_point(|(page, _)| *page < start);
            let here = inside.get(at).filter(|(page, _)| *page == start);
            let next = inside.get(at).map_or(entry.range.end, |(page, _)| *page);
            let end = if here.is_some() { start + PAGE } else { next };
            let mut permissions = *permissions;
            if let Some((_, true)) = here {
                permissions[1] = b'w';
            }
            let offset =
                entry.offset + if entry.inode != 0 { start - entry.range.start } else { 0 };
            let piece =
                MapPiece { range: start..end, permissions, offset, rest, touched: here.is_some() };
            match pieces.last_mut() {
                Some(last) if (last.touched || piece.touched) && piece.continues(last) => {
                    last.range.end = end;
                    last.touched = piece.touched;
                }
                _ => pieces.push(piece),
            }
            start = end;
        }
    }
    let mut out = Vec::with_capacity(text.len());
    for piece in pieces {
        let permissions = String::from_utf8_lossy(&piece.permissions).into_owned();
        let head = format!(
            "{:08x}-{:08x} {permissions} {:08x} ",
            piece.range.start, piece.range.end, piece.offset
        );
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(piece.rest);
        out.push(b'\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, guarded: &[u64]) -> String {
        String::from_utf8(without_guards(text.as_bytes(), guarded, &[])).expect("text")
    }

    #[test]
    fn guarded_pages_join_their_neighbours() {
        let text = "00001000-00002000 rwxp 00000000 00:00 0 \n\
                    00002000-00003000 r-xp 00000000 00:00 0 \n\
                    00003000-00005000 rwxp 00000000 00:00 0 \n";
        assert_eq!(shown(text, &[0x2000]), "00001000-00005000 rwxp 00000000 00:00 0 \n");
        assert_eq!(shown(text, &[]), text);
        assert_eq!(shown(text, &[0x9000]), text);
    }

    #[test]
    fn what_the_guest_keeps_apart_stays_apart() {
        // The kernel has joined a guarded page with one that the guest may not write either.
        let text = "00001000-00003000 r-xp 00000000 00:00 0 \n00003000-00004000 rwxp 00000000 \
            00:00 0  [heap]\n";
        assert_eq!(
            shown(text, &[0x2000]),
            "00001000-00002000 r-xp 00000000 00:00 0 \n00002000-00003000 rwxp 00000000 00:00 0 \n\
             00003000-00004000 rwxp 00000000 00:00 0  [heap]\n"
        );
    }

    #[test]
    fn hidden_pages_join_their_neighbours() {
        let text = "00001000-00002000 r-xp 00002000 fe:01 7   /lib/a\n\
                    00002000-00004000 r-xp 00003000 fe:01 7   /lib/a\n\
                    00004000-00005000 r-xp 00005000 fe:01 7   /lib/a\n\
                    00005000-00006000 r--p 00006000 fe:01 7   /lib/a\n";
        let shown = without_guards(text.as_bytes(), &[], &[0x2000, 0x3000]);
        assert_eq!(
            String::from_utf8_lossy(&shown),
            "00001000-00005000 r-xp 00002000 fe:01 7   /lib/a\n\
             00005000-00006000 r--p 00006000 fe:01 7   /lib/a\n"
        );
        let shown = without_guards(text.as_bytes(), &[], &[0x9000]);
        assert_eq!(String::from_utf8_lossy(&shown), text);
    }

    #[test]
    fn files_keep_their_offsets() {
        let text = "00001000-00004000 r-xp 00002000 fe:01 7   /lib/a b\n00004000-00005000 rwxp \
            00005000 fe:01 7   /lib/a b\n";
        assert_eq!(
            shown(text, &[0x2000, 0x3000]),
            "00001000-00002000 r-xp 00002000 fe:01 7   /lib/a b\n00002000-00005000 rwxp 00003000 \
                fe:01 7   /lib/a b\n"
        );
    }
}
