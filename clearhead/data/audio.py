"""Sound files to samples at 16 kHz, and samples to the log-mel spectrogram that Whisper reads."""

from __future__ import annotations

import math
import wave
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from clearhead.extras import install_command

from .corpus import DataError

RATE = 16_000  # samples per second
FRAME, HOP = 400, 160  # samples of a frame, and from one frame to the next: 25 ms and 10 ms
BLOCK = 3_000  # frames that are transformed at a time
LOWEST = 1e-10  # of a band's power before the logarithm
RANGE = 8.0  # powers of ten below the loudest band that are kept

Samples = Float[np.ndarray, " N"]


def read_audio(path: Path) -> Samples:
    """The samples of a sound file, −1 to 1, as one channel at 16 kHz. WAV needs no other package."""
    if not path.is_file():
        raise DataError(f"there is no sound file {path}")
    try:
        import soundfile
    except ImportError:
        samples, rate = read_wav(path)
    else:
        try:
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise DataError(f"{path} cannot be read as sound: {error.error_string}") from None
    if len(samples) == 0:
        raise DataError(f"{path} has no samples")
    return resample(samples.mean(axis=1), rate)


def read_wav(path: Path) -> tuple[Float[np.ndarray, "N Channels"], int]:
    """The channels of a WAV file of whole numbers, by Python's own library."""
    try:
        with wave.open(str(path)) as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            data = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError) as error:
        raise DataError(f"{path} is not a plain WAV file ({error}); others need {install_command('audio')}") from None
    if width == 1:  # the only width without a sign
        values = (data.astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(data) // width, 4), np.uint8)
        wide[:, 4 - width :] = data[: len(wide) * width].reshape(-1, width)  # little-endian: low bytes first
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return values.reshape(-1, channels), rate


def resample(samples: Samples, rate: int) -> Samples:
    """The same sound at 16 kHz, through a low-pass filter: a sinc of 10 zeros on each side under a Kaiser window.

    Sample n of the result is at n·down/up of the source. Results whose positions have the same fraction use the same
    weights, so there is one product for each fraction.
    """
    if rate == RATE:
        return samples.astype(np.float32)
    shared = math.gcd(rate, RATE)
    up, down = RATE // shared, rate // shared
    widest = max(up, down)
    half = 10 * widest
    places = np.arange(-half, half + 1)
    taps = np.sinc(places / widest) * np.kaiser(2 * half + 1, 5.0)
    taps *= up / taps.sum()
    count, reach = -(-len(samples) * up // down), half // up + 1  # source samples on each side
    padded = np.pad(samples, (reach, reach + 1)).astype(np.float64)
    out = np.empty(count, np.float32)
    for first in range(min(up, count)):
        base, fraction = divmod(first * down, up)  # of the source sample at or before this one
        at = half + fraction - up * np.arange(-reach, reach + 1)  # weight of source sample base + k
        inside = (at >= 0) & (at <= 2 * half)
        weights = np.where(inside, taps[np.clip(at, 0, 2 * half)], 0.0)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)[base::down]
        mine = out[first::up]
        mine[:] = windows[: len(mine)] @ weights
    return out


def log_mel(samples: Samples, mels: int, frames: int) -> Float[np.ndarray, "Mels Frames"]:
    """The spectrogram of `frames` frames of 10 ms; shorter sound is followed by silence, longer sound is cut.

    Power of each frame's Fourier transform under a Hann window, summed in `mels` bands, then log₁₀, cut to eight powers
    of ten below the loudest band, and scaled to about ±1  (Radford et al. 2022, 2.2).
    """
    length = frames * HOP
    samples = np.pad(samples[:length], (0, max(0, length - len(samples)))).astype(np.float64)
    padded = np.pad(samples, FRAME // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    logs = np.empty((mels, frames))
    for first in range(0, frames, BLOCK):
        power = np.abs(np.fft.rfft(windows[first : first + BLOCK] * hann)) ** 2
        logs[:, first : first + BLOCK] = np.log10(np.maximum(power @ mel_bands(mels), LOWEST)).T
    return ((np.maximum(logs, logs.max() - RANGE) + 4.0) / 4.0).astype(np.float32)


@cache
def mel_bands(mels: int) -> Float[np.ndarray, "Frequencies Mels"]:
    """Triangles over the frequencies, evenly spaced on Slaney's mel scale, each with an area of 1.

    The scale is linear up to 1 kHz (15 mels) and then logarithmic, 27 mels for a factor of 6.4.
    """
    step = math.log(6.4) / 27.0
    highest = 15.0 + math.log(RATE / 2 / 1000.0) / step
    points = np.linspace(0.0, highest, mels + 2)
    edges = np.where(points < 15.0, points * 200.0 / 3.0, 1000.0 * np.exp(step * (points - 15.0)))
    frequencies = np.linspace(0, RATE / 2, FRAME // 2 + 1)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)
