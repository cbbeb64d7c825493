//! The reasons behind two errors of lease mode, and the limits that one of them names.

pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Each step that is stored writes all of them again, so a large operation belongs into a table of its own.
pub(crate) const MAX_STEPS: usize = 100;
pub(crate) const MAX_RESULT_BYTES: usize = 64 * 1024;
pub(crate) const MAX_STEPS_BYTES: usize = 256 * 1024;

/// Why a step was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidStep {
    /// The name is empty, too long, or contains a NUL.
    #[error("a name takes 1 to {MAX_NAME_BYTES} bytes without NUL")]
    Name,
    /// This attempt has asked for the step before, and got its result or is still performing it.
    #[error("this attempt has asked for it before; names are unique, so put the index of a loop into the name")]
    Repeated,
    /// The step was asked for inside another step of the same operation.
    #[error("it was asked for inside another step of the same operation; perform one after the other")]
    Nested,
    /// The operation has another policy.
    #[error("the operation has another policy than Policy::InSteps, so its steps would not be stored")]
    Policy,
    /// Too many steps, or too large a result.
    #[error(
        "an operation takes {MAX_STEPS} steps, a result {MAX_RESULT_BYTES} bytes, and all results \
         {MAX_STEPS_BYTES} bytes; store large values in a table of your own, and return their key"
    )]
    TooLarge,
}

/// Why a [`Reconciler`](crate::lease::Reconciler) refuses its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotReconcilable {
    /// The next caller does the work again, so nothing is ever in doubt.
    #[error("under Policy::AtLeastOnce nothing is in doubt; run a Resumer")]
    AtLeastOnce,
    /// The search needs the index of the stored requests.
    #[error("the claims do not store their requests; set Leasing::with_stored_request")]
    NoStoredRequest,
    /// Too few looks.
    #[error("the looks without a trace are at least 2, and at most as many as all looks")]
    Looks,
}

/// Why the options do not allow to store requests or to resume operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotResumable {
    /// Nobody may do the work of this policy again.
    #[error("under Policy::AtMostOnce nobody may do the work again; use Policy::InSteps or AtLeastOnce")]
    AtMostOnce,
    /// The call has a fingerprint in place of a body.
    #[error("the call has no body to store; give the body itself, and not its fingerprint")]
    NoBody,
    /// The options do not store requests, or the HTTP layer is transactional.
    #[error("the requests are not stored; use a leased layer with Leasing::with_stored_request(true)")]
    NotStored,
    /// Work that always fails would be resumed for ever.
    #[error("the number of attempts is unlimited; set Leasing::with_max_attempts")]
    UnlimitedAttempts,
}
