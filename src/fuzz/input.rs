//! Choices from the bytes of an input, for targets whose input is not one text.

/// The rest of an input. Past its end every number is 0.
#[derive(Debug)]
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Input(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number below `end`, which is at least 1.
    pub(super) fn below(&mut self, end: usize) -> usize {
        let number = usize::from(self.byte()) << 8 | usize::from(self.byte());
        number % end.max(1)
    }

    /// A number below a small `end`, from one byte.
    pub(super) fn small(&mut self, end: u8) -> u8 {
        self.byte() % end.max(1)
    }

    pub(super) fn truth(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// Nothing, or a value.
    pub(super) fn option<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.truth().then(|| value(self))
    }

    /// At most `most` bytes.
    pub(super) fn bytes(&mut self, most: u8) -> &'a [u8] {
        let length = usize::from(self.byte().min(most)).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes
    }

    /// A text with at most `most` bytes; wrong UTF-8 is replaced.
    pub(super) fn text(&mut self, most: u8) -> String {
        String::from_utf8_lossy(self.bytes(most)).into_owned()
    }

    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }
}
