//! Lines of bytes that arrive in pieces; pure.

/// The limit of one line: an object with its metadata only. An object has at most 1.5 MiB in etcd.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Collects pieces, and returns whole lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    bytes: Vec<u8>,
    /// The bytes that were searched for an end of line.
    searched: usize,
}

impl Lines {
    /// Adds a piece.
    ///
    /// # Errors
    /// When the unread line is longer than an object can be.
    pub(super) fn add(&mut self, piece: &[u8]) -> Result<(), TooLong> {
        if self.bytes.len() + piece.len() > LINE_BYTES_MAX {
            return Err(TooLong);
        }
        self.bytes.extend_from_slice(piece);
        Ok(())
    }

    /// The next whole line that is not empty, without its end.
    pub(super) fn next(&mut self) -> Option<Vec<u8>> {
        while let Some(end) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') {
            let rest = self.bytes.split_off(self.searched + end + 1);
            let mut line = std::mem::replace(&mut self.bytes, rest);
            self.searched = 0;
            line.pop();
            if !line.is_empty() {
                return Some(line);
            }
        }
        self.searched = self.bytes.len();
        None
    }
}

/// The line is longer than an object can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooLong;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_without_an_end_is_bounded() {
        let (mut lines, piece) = (Lines::default(), vec![b'x'; 1 << 20]);
        for _ in 0..4 {
            lines.add(&piece).unwrap();
            assert_eq!(lines.next(), None);
        }
        assert_eq!(lines.add(b"x"), Err(TooLong));
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_the_pieces(text in "[ab\n]{0,60}", cuts in prop::collection::vec(0_usize..60, 0..6)) {
            let (mut lines, mut found, mut from) = (Lines::default(), Vec::new(), 0);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.push(text.len());
            cuts.sort_unstable();
            for cut in cuts {
                lines.add(&text.as_bytes()[from..cut]).unwrap();
                from = cut;
                while let Some(line) = lines.next() {
                    found.push(String::from_utf8(line).unwrap());
                }
            }
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            let expected: Vec<&str> = whole.split('\n').filter(|line| !line.is_empty()).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
