//! Choices that depend on the seed alone, so they can be repeated. The machine decides the moments at which they
//! happen.

/// SplitMix64, which is short, and good enough to choose a victim. An update of the crate `rand` may change the numbers
/// that a seed gives.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// A sequence for each chooser, so that none depends on how often the others choose.
    pub(crate) fn new(seed: u64, chooser: &str) -> Self {
        let mut random = Self(seed);
        for byte in chooser.bytes() {
            random.0 ^= u64::from(byte);
            random.0 = random.next();
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `end`, without `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).expect("an index")]
    }

    pub(crate) fn millis(&mut self, range: std::ops::Range<u64>) -> std::time::Duration {
        std::time::Duration::from_millis(range.start + self.below(range.end - range.start))
    }
}
