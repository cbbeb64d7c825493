//! What was promised, and whether it is kept.

use crate::setting::Told;

#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) case: &'static str,
    pub(crate) what: String,
    pub(crate) setting: Option<Told>,
    pub(crate) wanted: Bound,
    pub(crate) seen: f64,
    pub(crate) met: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// A figure that is told, and of which nothing was promised.
    Told,
}

impl Target {
    pub(crate) fn new(case: &'static str, what: String, setting: Option<Told>, wanted: Bound, seen: f64) -> Self {
        let met = match wanted {
            Bound::AtLeast(least) => seen >= least,
            Bound::AtMost(most) => seen <= most,
            Bound::Told => true,
        };
        Self { case, what, setting, wanted, seen, met }
    }
    pub(crate) fn promised(&self) -> bool {
        !matches!(self.wanted, Bound::Told)
    }
}
