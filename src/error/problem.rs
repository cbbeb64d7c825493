//! Why a step was refused, and the limits of steps.

pub(crate) const MAX_NAME_BYTES: usize = 255;
/// Each completion of a step writes all results again, so a larger operation needs a table of its own.
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
    /// This attempt has called the step before. It has its result, or still performs it.
    #[error("this attempt has called it before; names are unique, so put the index of a loop into the name")]
    Repeated,
    /// The step was called inside another step of the same operation.
    #[error("it was called inside another step of the same operation; perform one after the other")]
    Nested,
    /// The operation has another policy.
    #[error("the policy of the operation is not Policy::InSteps, so the step would not be stored")]
    Policy,
    /// Too many steps, or too large a result.
    #[error(
        "an operation takes {MAX_STEPS} steps, a result {MAX_RESULT_BYTES} bytes, and all results \
         {MAX_STEPS_BYTES} bytes; store large values in a table of your own, and return their key"
    )]
    TooLarge,
}
