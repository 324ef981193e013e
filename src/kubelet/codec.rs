//! Encodes messages with prost, into a buffer that is as long as the message.
//!
//! tonic's own codec allocates 8 KiB for each stream before there is a message, and keeps them
//! while the stream is open. Every registration leaves the kubelet a stream, and most lists have a
//! few hundred bytes.

use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::{ProstCodec, ProstDecoder};

/// A stream with this many bytes to send does not wait for more. tonic's own codec has the same
/// limit.
const SENDS_AT: usize = 32 << 10;

/// A codec that sends `T` and receives `U`.
#[derive(Debug)]
pub struct Exact<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Exact<T, U> {
    fn default() -> Self {
        Exact(PhantomData)
    }
}

impl<T, U> Codec for Exact<T, U>
where
    T: Message + 'static,
    U: Message + Default + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ExactEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ExactEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::default().decoder()
    }
}

/// Reserves the exact length of a message, then writes it.
#[derive(Debug)]
pub struct ExactEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for ExactEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(message.encoded_len());
        message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(0, SENDS_AT)
    }
}
