module {
  func.func @main(%arg0: tensor<256x64xf32>, %arg1: tensor<256x64xf32>, %arg2: tensor<64x64xf32>, %arg3: tensor<64x64xf32>, %arg4: tensor<64x64xf32>, %arg5: tensor<64x64xf32>, %arg6: tensor<256x64xf32>, %arg7: tensor<64x256xf32>, %arg8: tensor<64x64xf32>, %arg9: tensor<64x64xf32>, %arg10: tensor<64x64xf32>, %arg11: tensor<64x64xf32>, %arg12: tensor<256x64xf32>, %arg13: tensor<64x256xf32>, %arg14: tensor<8x64xi64>, %arg15: tensor<8x64xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<512xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<512xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<64x64xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<64xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<64xi64>
    %c_4 = stablehlo.constant dense<64> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<64x64xf32>
    %cst_9 = stablehlo.constant dense_resource<torch_tensor_64_8_torch.float32_1> : tensor<64x8xf32>
    %cst_10 = stablehlo.constant dense_resource<torch_tensor_64_8_torch.float32> : tensor<64x8xf32>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<8x64x256xf32>
    %cst_12 = arith.constant dense<2> : tensor<1xi64>
    %cst_13 = arith.constant dense<64> : tensor<1xi64>
    %cst_14 = arith.constant dense<9.9999999999999995E-7> : tensor<1xf64>
    %cst_15 = arith.constant dense<16> : tensor<1xi64>
    %cst_16 = arith.constant dense<4.000000e+00> : tensor<1xf64>
    %cst_17 = arith.constant dense<15> : tensor<1xi64>
    %0 = "stablehlo.gather"(%arg0, %arg14) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 64>}> : (tensor<256x64xf32>, tensor<8x64xi64>) -> tensor<8x64x64xf32>
    %1 = stablehlo.convert %0 : tensor<8x64x64xf32>
    %2 = stablehlo.convert %cst_12 : (tensor<1xi64>) -> tensor<1xf32>
    %3 = stablehlo.reshape %2 : (tensor<1xf32>) -> tensor<f32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<8x64x64xf32>
    %5 = stablehlo.power %1, %4 : tensor<8x64x64xf32>
    %6 = stablehlo.reduce(%5 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %7 = stablehlo.reshape %6 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %8 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf32>
    %9 = stablehlo.reshape %8 : (tensor<1xf32>) -> tensor<f32>
    %10 = stablehlo.broadcast_in_dim %9, dims = [] : (tensor<f32>) -> tensor<8x64x1xf32>
    %11 = stablehlo.divide %7, %10 : tensor<8x64x1xf32>
    %12 = stablehlo.convert %cst_14 : (tensor<1xf64>) -> tensor<1xf32>
    %13 = stablehlo.reshape %12 : (tensor<1xf32>) -> tensor<f32>
    %14 = stablehlo.broadcast_in_dim %13, dims = [] : (tensor<f32>) -> tensor<8x64x1xf32>
    %15 = stablehlo.add %11, %14 : tensor<8x64x1xf32>
    %16 = stablehlo.rsqrt %15 : tensor<8x64x1xf32>
    %17 = stablehlo.broadcast_in_dim %16, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %18 = stablehlo.multiply %1, %17 : tensor<8x64x64xf32>
    %19 = stablehlo.power %18, %4 : tensor<8x64x64xf32>
    %20 = stablehlo.reduce(%19 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %21 = stablehlo.reshape %20 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %22 = stablehlo.divide %21, %10 : tensor<8x64x1xf32>
    %23 = stablehlo.add %22, %14 : tensor<8x64x1xf32>
    %24 = stablehlo.rsqrt %23 : tensor<8x64x1xf32>
    %25 = stablehlo.broadcast_in_dim %24, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %26 = stablehlo.multiply %18, %25 : tensor<8x64x64xf32>
    %27 = stablehlo.transpose %arg2, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %28 = stablehlo.reshape %26 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %29 = stablehlo.dot_general %28, %27, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %30 = stablehlo.reshape %29 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %31 = stablehlo.reshape %30 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %32 = stablehlo.transpose %arg3, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %33 = stablehlo.dot_general %28, %32, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %34 = stablehlo.reshape %33 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %35 = stablehlo.reshape %34 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %36 = stablehlo.transpose %arg4, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %37 = stablehlo.dot_general %28, %36, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %38 = stablehlo.reshape %37 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %39 = stablehlo.reshape %38 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %40 = stablehlo.slice %31 [0:8, 0:64, 0:4, 0:8] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %41 = stablehlo.slice %31 [0:8, 0:64, 0:4, 8:16] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %42 = stablehlo.reshape %cst_10 : (tensor<64x8xf32>) -> tensor<1x64x8xf32>
    %43 = stablehlo.reshape %42 : (tensor<1x64x8xf32>) -> tensor<1x64x1x8xf32>
    %44 = stablehlo.reshape %cst_9 : (tensor<64x8xf32>) -> tensor<1x64x8xf32>
    %45 = stablehlo.reshape %44 : (tensor<1x64x8xf32>) -> tensor<1x64x1x8xf32>
    %46 = stablehlo.broadcast_in_dim %43, dims = [0, 1, 2, 3] : (tensor<1x64x1x8xf32>) -> tensor<8x64x4x8xf32>
    %47 = stablehlo.multiply %40, %46 : tensor<8x64x4x8xf32>
    %48 = stablehlo.broadcast_in_dim %45, dims = [0, 1, 2, 3] : (tensor<1x64x1x8xf32>) -> tensor<8x64x4x8xf32>
    %49 = stablehlo.multiply %41, %48 : tensor<8x64x4x8xf32>
    %50 = stablehlo.subtract %47, %49 : tensor<8x64x4x8xf32>
    %51 = stablehlo.multiply %41, %46 : tensor<8x64x4x8xf32>
    %52 = stablehlo.multiply %40, %48 : tensor<8x64x4x8xf32>
    %53 = stablehlo.add %51, %52 : tensor<8x64x4x8xf32>
    %54 = stablehlo.concatenate %50, %53, dim = 3 : (tensor<8x64x4x8xf32>, tensor<8x64x4x8xf32>) -> tensor<8x64x4x16xf32>
    %55 = stablehlo.slice %35 [0:8, 0:64, 0:4, 0:8] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %56 = stablehlo.slice %35 [0:8, 0:64, 0:4, 8:16] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %57 = stablehlo.multiply %55, %46 : tensor<8x64x4x8xf32>
    %58 = stablehlo.multiply %56, %48 : tensor<8x64x4x8xf32>
    %59 = stablehlo.subtract %57, %58 : tensor<8x64x4x8xf32>
    %60 = stablehlo.multiply %56, %46 : tensor<8x64x4x8xf32>
    %61 = stablehlo.multiply %55, %48 : tensor<8x64x4x8xf32>
    %62 = stablehlo.add %60, %61 : tensor<8x64x4x8xf32>
    %63 = stablehlo.concatenate %59, %62, dim = 3 : (tensor<8x64x4x8xf32>, tensor<8x64x4x8xf32>) -> tensor<8x64x4x16xf32>
    %64 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<8x64x4x16xf32>
    %65 = stablehlo.power %54, %64 : tensor<8x64x4x16xf32>
    %66 = stablehlo.reduce(%65 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x64x4x16xf32>, tensor<f32>) -> tensor<8x64x4xf32>
    %67 = stablehlo.reshape %66 : (tensor<8x64x4xf32>) -> tensor<8x64x4x1xf32>
    %68 = stablehlo.convert %cst_15 : (tensor<1xi64>) -> tensor<1xf32>
    %69 = stablehlo.reshape %68 : (tensor<1xf32>) -> tensor<f32>
    %70 = stablehlo.broadcast_in_dim %69, dims = [] : (tensor<f32>) -> tensor<8x64x4x1xf32>
    %71 = stablehlo.divide %67, %70 : tensor<8x64x4x1xf32>
    %72 = stablehlo.broadcast_in_dim %13, dims = [] : (tensor<f32>) -> tensor<8x64x4x1xf32>
    %73 = stablehlo.add %71, %72 : tensor<8x64x4x1xf32>
    %74 = stablehlo.rsqrt %73 : tensor<8x64x4x1xf32>
    %75 = stablehlo.broadcast_in_dim %74, dims = [0, 1, 2, 3] : (tensor<8x64x4x1xf32>) -> tensor<8x64x4x16xf32>
    %76 = stablehlo.multiply %54, %75 : tensor<8x64x4x16xf32>
    %77 = stablehlo.power %63, %64 : tensor<8x64x4x16xf32>
    %78 = stablehlo.reduce(%77 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x64x4x16xf32>, tensor<f32>) -> tensor<8x64x4xf32>
    %79 = stablehlo.reshape %78 : (tensor<8x64x4xf32>) -> tensor<8x64x4x1xf32>
    %80 = stablehlo.divide %79, %70 : tensor<8x64x4x1xf32>
    %81 = stablehlo.add %80, %72 : tensor<8x64x4x1xf32>
    %82 = stablehlo.rsqrt %81 : tensor<8x64x4x1xf32>
    %83 = stablehlo.broadcast_in_dim %82, dims = [0, 1, 2, 3] : (tensor<8x64x4x1xf32>) -> tensor<8x64x4x16xf32>
    %84 = stablehlo.multiply %63, %83 : tensor<8x64x4x16xf32>
    %85 = stablehlo.transpose %76, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %86 = stablehlo.transpose %84, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %87 = stablehlo.transpose %39, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %88 = stablehlo.transpose %86, dims = [0, 1, 3, 2] : (tensor<8x4x64x16xf32>) -> tensor<8x4x16x64xf32>
    %89 = stablehlo.reshape %85 : (tensor<8x4x64x16xf32>) -> tensor<32x64x16xf32>
    %90 = stablehlo.reshape %88 : (tensor<8x4x16x64xf32>) -> tensor<32x16x64xf32>
    %91 = stablehlo.broadcast_in_dim %90, dims = [0, 1, 2] : (tensor<32x16x64xf32>) -> tensor<32x16x64xf32>
    %92 = stablehlo.dot_general %89, %91, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x64x16xf32>, tensor<32x16x64xf32>) -> tensor<32x64x64xf32>
    %93 = stablehlo.reshape %92 : (tensor<32x64x64xf32>) -> tensor<8x4x64x64xf32>
    %94 = stablehlo.convert %cst_16 : (tensor<1xf64>) -> tensor<1xf32>
    %95 = stablehlo.reshape %94 : (tensor<1xf32>) -> tensor<f32>
    %96 = stablehlo.broadcast_in_dim %95, dims = [] : (tensor<f32>) -> tensor<8x4x64x64xf32>
    %97 = stablehlo.divide %93, %96 : tensor<8x4x64x64xf32>
    %98 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %99 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %100 = stablehlo.divide %99, %98 : tensor<f64>
    %101 = stablehlo.ceil %100 : tensor<f64>
    %102 = stablehlo.convert %101 : (tensor<f64>) -> tensor<i64>
    %103 = stablehlo.reshape %102 : (tensor<i64>) -> tensor<1xi64>
    %104 = stablehlo.dynamic_iota %103, dim = 0 : (tensor<1xi64>) -> tensor<64xi64>
    %105 = stablehlo.multiply %104, %c_3 : tensor<64xi64>
    %106 = stablehlo.add %105, %c_2 : tensor<64xi64>
    %107 = stablehlo.reshape %106 : (tensor<64xi64>) -> tensor<1x64xi64>
    %108 = stablehlo.reshape %106 : (tensor<64xi64>) -> tensor<64x1xi64>
    %109 = stablehlo.broadcast_in_dim %107, dims = [0, 1] : (tensor<1x64xi64>) -> tensor<64x64xi64>
    %110 = stablehlo.broadcast_in_dim %108, dims = [0, 1] : (tensor<64x1xi64>) -> tensor<64x64xi64>
    %111 = stablehlo.subtract %109, %110 : tensor<64x64xi64>
    %112 = stablehlo.compare LE, %111, %c_1, SIGNED : (tensor<64x64xi64>, tensor<64x64xi64>) -> tensor<64x64xi1>
    %113 = stablehlo.broadcast_in_dim %112, dims = [0, 1] : (tensor<64x64xi1>) -> tensor<64x64xi1>
    %114 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %115 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<64x64xf32>
    %116 = stablehlo.select %113, %114, %115 : tensor<64x64xi1>, tensor<64x64xf32>
    %117 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %118 = stablehlo.broadcast_in_dim %117, dims = [] : (tensor<f32>) -> tensor<64x64xf32>
    %119 = stablehlo.compare EQ, %116, %118, FLOAT : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xi1>
    %120 = stablehlo.reshape %119 : (tensor<64x64xi1>) -> tensor<1x1x64x64xi1>
    %121 = stablehlo.broadcast_in_dim %120, dims = [0, 1, 2, 3] : (tensor<1x1x64x64xi1>) -> tensor<8x4x64x64xi1>
    %122 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x4x64x64xf32>
    %123 = stablehlo.broadcast_in_dim %97, dims = [0, 1, 2, 3] : (tensor<8x4x64x64xf32>) -> tensor<8x4x64x64xf32>
    %124 = stablehlo.select %121, %122, %123 : tensor<8x4x64x64xi1>, tensor<8x4x64x64xf32>
    %125 = stablehlo.reduce(%124 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<8x4x64x64xf32>, tensor<f32>) -> tensor<8x4x64xf32>
    %126 = stablehlo.reshape %125 : (tensor<8x4x64xf32>) -> tensor<8x4x64x1xf32>
    %127 = stablehlo.broadcast_in_dim %126, dims = [0, 1, 2, 3] : (tensor<8x4x64x1xf32>) -> tensor<8x4x64x64xf32>
    %128 = stablehlo.subtract %124, %127 : tensor<8x4x64x64xf32>
    %129 = stablehlo.exponential %128 : tensor<8x4x64x64xf32>
    %130 = stablehlo.reduce(%129 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x4x64x64xf32>, tensor<f32>) -> tensor<8x4x64xf32>
    %131 = stablehlo.reshape %130 : (tensor<8x4x64xf32>) -> tensor<8x4x64x1xf32>
    %132 = stablehlo.broadcast_in_dim %131, dims = [0, 1, 2, 3] : (tensor<8x4x64x1xf32>) -> tensor<8x4x64x64xf32>
    %133 = stablehlo.divide %129, %132 : tensor<8x4x64x64xf32>
    %134 = stablehlo.reshape %133 : (tensor<8x4x64x64xf32>) -> tensor<32x64x64xf32>
    %135 = stablehlo.reshape %87 : (tensor<8x4x64x16xf32>) -> tensor<32x64x16xf32>
    %136 = stablehlo.broadcast_in_dim %135, dims = [0, 1, 2] : (tensor<32x64x16xf32>) -> tensor<32x64x16xf32>
    %137 = stablehlo.dot_general %134, %136, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x64x64xf32>, tensor<32x64x16xf32>) -> tensor<32x64x16xf32>
    %138 = stablehlo.reshape %137 : (tensor<32x64x16xf32>) -> tensor<8x4x64x16xf32>
    %139 = stablehlo.transpose %138, dims = [0, 2, 1, 3] : (tensor<8x4x64x16xf32>) -> tensor<8x64x4x16xf32>
    %140 = stablehlo.reshape %139 : (tensor<8x64x4x16xf32>) -> tensor<8x64x64xf32>
    %141 = stablehlo.transpose %arg5, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %142 = stablehlo.reshape %140 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %143 = stablehlo.dot_general %142, %141, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %144 = stablehlo.reshape %143 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %145 = stablehlo.add %18, %144 : tensor<8x64x64xf32>
    %146 = stablehlo.power %145, %4 : tensor<8x64x64xf32>
    %147 = stablehlo.reduce(%146 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %148 = stablehlo.reshape %147 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %149 = stablehlo.divide %148, %10 : tensor<8x64x1xf32>
    %150 = stablehlo.add %149, %14 : tensor<8x64x1xf32>
    %151 = stablehlo.rsqrt %150 : tensor<8x64x1xf32>
    %152 = stablehlo.broadcast_in_dim %151, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %153 = stablehlo.multiply %145, %152 : tensor<8x64x64xf32>
    %154 = stablehlo.transpose %arg6, dims = [1, 0] : (tensor<256x64xf32>) -> tensor<64x256xf32>
    %155 = stablehlo.reshape %153 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %156 = stablehlo.dot_general %155, %154, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x256xf32>) -> tensor<512x256xf32>
    %157 = stablehlo.reshape %156 : (tensor<512x256xf32>) -> tensor<8x64x256xf32>
    %158 = stablehlo.maximum %157, %cst_11 : tensor<8x64x256xf32>
    %159 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<f32>) -> tensor<8x64x256xf32>
    %160 = stablehlo.power %158, %159 : tensor<8x64x256xf32>
    %161 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<64x256xf32>) -> tensor<256x64xf32>
    %162 = stablehlo.reshape %160 : (tensor<8x64x256xf32>) -> tensor<512x256xf32>
    %163 = stablehlo.dot_general %162, %161, contracting_dims = [1] x [0] : (tensor<512x256xf32>, tensor<256x64xf32>) -> tensor<512x64xf32>
    %164 = stablehlo.reshape %163 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %165 = stablehlo.add %145, %164 : tensor<8x64x64xf32>
    %166 = stablehlo.power %165, %4 : tensor<8x64x64xf32>
    %167 = stablehlo.reduce(%166 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %168 = stablehlo.reshape %167 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %169 = stablehlo.divide %168, %10 : tensor<8x64x1xf32>
    %170 = stablehlo.add %169, %14 : tensor<8x64x1xf32>
    %171 = stablehlo.rsqrt %170 : tensor<8x64x1xf32>
    %172 = stablehlo.broadcast_in_dim %171, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %173 = stablehlo.multiply %165, %172 : tensor<8x64x64xf32>
    %174 = stablehlo.transpose %arg8, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %175 = stablehlo.reshape %173 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %176 = stablehlo.dot_general %175, %174, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %177 = stablehlo.reshape %176 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %178 = stablehlo.reshape %177 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %179 = stablehlo.transpose %arg9, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %180 = stablehlo.dot_general %175, %179, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %181 = stablehlo.reshape %180 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %182 = stablehlo.reshape %181 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %183 = stablehlo.transpose %arg10, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %184 = stablehlo.dot_general %175, %183, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %185 = stablehlo.reshape %184 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %186 = stablehlo.reshape %185 : (tensor<8x64x64xf32>) -> tensor<8x64x4x16xf32>
    %187 = stablehlo.slice %178 [0:8, 0:64, 0:4, 0:8] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %188 = stablehlo.slice %178 [0:8, 0:64, 0:4, 8:16] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %189 = stablehlo.multiply %187, %46 : tensor<8x64x4x8xf32>
    %190 = stablehlo.multiply %188, %48 : tensor<8x64x4x8xf32>
    %191 = stablehlo.subtract %189, %190 : tensor<8x64x4x8xf32>
    %192 = stablehlo.multiply %188, %46 : tensor<8x64x4x8xf32>
    %193 = stablehlo.multiply %187, %48 : tensor<8x64x4x8xf32>
    %194 = stablehlo.add %192, %193 : tensor<8x64x4x8xf32>
    %195 = stablehlo.concatenate %191, %194, dim = 3 : (tensor<8x64x4x8xf32>, tensor<8x64x4x8xf32>) -> tensor<8x64x4x16xf32>
    %196 = stablehlo.slice %182 [0:8, 0:64, 0:4, 0:8] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %197 = stablehlo.slice %182 [0:8, 0:64, 0:4, 8:16] : (tensor<8x64x4x16xf32>) -> tensor<8x64x4x8xf32>
    %198 = stablehlo.multiply %196, %46 : tensor<8x64x4x8xf32>
    %199 = stablehlo.multiply %197, %48 : tensor<8x64x4x8xf32>
    %200 = stablehlo.subtract %198, %199 : tensor<8x64x4x8xf32>
    %201 = stablehlo.multiply %197, %46 : tensor<8x64x4x8xf32>
    %202 = stablehlo.multiply %196, %48 : tensor<8x64x4x8xf32>
    %203 = stablehlo.add %201, %202 : tensor<8x64x4x8xf32>
    %204 = stablehlo.concatenate %200, %203, dim = 3 : (tensor<8x64x4x8xf32>, tensor<8x64x4x8xf32>) -> tensor<8x64x4x16xf32>
    %205 = stablehlo.power %195, %64 : tensor<8x64x4x16xf32>
    %206 = stablehlo.reduce(%205 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x64x4x16xf32>, tensor<f32>) -> tensor<8x64x4xf32>
    %207 = stablehlo.reshape %206 : (tensor<8x64x4xf32>) -> tensor<8x64x4x1xf32>
    %208 = stablehlo.divide %207, %70 : tensor<8x64x4x1xf32>
    %209 = stablehlo.add %208, %72 : tensor<8x64x4x1xf32>
    %210 = stablehlo.rsqrt %209 : tensor<8x64x4x1xf32>
    %211 = stablehlo.broadcast_in_dim %210, dims = [0, 1, 2, 3] : (tensor<8x64x4x1xf32>) -> tensor<8x64x4x16xf32>
    %212 = stablehlo.multiply %195, %211 : tensor<8x64x4x16xf32>
    %213 = stablehlo.power %204, %64 : tensor<8x64x4x16xf32>
    %214 = stablehlo.reduce(%213 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x64x4x16xf32>, tensor<f32>) -> tensor<8x64x4xf32>
    %215 = stablehlo.reshape %214 : (tensor<8x64x4xf32>) -> tensor<8x64x4x1xf32>
    %216 = stablehlo.divide %215, %70 : tensor<8x64x4x1xf32>
    %217 = stablehlo.add %216, %72 : tensor<8x64x4x1xf32>
    %218 = stablehlo.rsqrt %217 : tensor<8x64x4x1xf32>
    %219 = stablehlo.broadcast_in_dim %218, dims = [0, 1, 2, 3] : (tensor<8x64x4x1xf32>) -> tensor<8x64x4x16xf32>
    %220 = stablehlo.multiply %204, %219 : tensor<8x64x4x16xf32>
    %221 = stablehlo.transpose %212, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %222 = stablehlo.transpose %220, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %223 = stablehlo.transpose %186, dims = [0, 2, 1, 3] : (tensor<8x64x4x16xf32>) -> tensor<8x4x64x16xf32>
    %224 = stablehlo.transpose %222, dims = [0, 1, 3, 2] : (tensor<8x4x64x16xf32>) -> tensor<8x4x16x64xf32>
    %225 = stablehlo.reshape %221 : (tensor<8x4x64x16xf32>) -> tensor<32x64x16xf32>
    %226 = stablehlo.reshape %224 : (tensor<8x4x16x64xf32>) -> tensor<32x16x64xf32>
    %227 = stablehlo.broadcast_in_dim %226, dims = [0, 1, 2] : (tensor<32x16x64xf32>) -> tensor<32x16x64xf32>
    %228 = stablehlo.dot_general %225, %227, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x64x16xf32>, tensor<32x16x64xf32>) -> tensor<32x64x64xf32>
    %229 = stablehlo.reshape %228 : (tensor<32x64x64xf32>) -> tensor<8x4x64x64xf32>
    %230 = stablehlo.divide %229, %96 : tensor<8x4x64x64xf32>
    %231 = stablehlo.broadcast_in_dim %230, dims = [0, 1, 2, 3] : (tensor<8x4x64x64xf32>) -> tensor<8x4x64x64xf32>
    %232 = stablehlo.select %121, %122, %231 : tensor<8x4x64x64xi1>, tensor<8x4x64x64xf32>
    %233 = stablehlo.reduce(%232 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<8x4x64x64xf32>, tensor<f32>) -> tensor<8x4x64xf32>
    %234 = stablehlo.reshape %233 : (tensor<8x4x64xf32>) -> tensor<8x4x64x1xf32>
    %235 = stablehlo.broadcast_in_dim %234, dims = [0, 1, 2, 3] : (tensor<8x4x64x1xf32>) -> tensor<8x4x64x64xf32>
    %236 = stablehlo.subtract %232, %235 : tensor<8x4x64x64xf32>
    %237 = stablehlo.exponential %236 : tensor<8x4x64x64xf32>
    %238 = stablehlo.reduce(%237 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<8x4x64x64xf32>, tensor<f32>) -> tensor<8x4x64xf32>
    %239 = stablehlo.reshape %238 : (tensor<8x4x64xf32>) -> tensor<8x4x64x1xf32>
    %240 = stablehlo.broadcast_in_dim %239, dims = [0, 1, 2, 3] : (tensor<8x4x64x1xf32>) -> tensor<8x4x64x64xf32>
    %241 = stablehlo.divide %237, %240 : tensor<8x4x64x64xf32>
    %242 = stablehlo.reshape %241 : (tensor<8x4x64x64xf32>) -> tensor<32x64x64xf32>
    %243 = stablehlo.reshape %223 : (tensor<8x4x64x16xf32>) -> tensor<32x64x16xf32>
    %244 = stablehlo.broadcast_in_dim %243, dims = [0, 1, 2] : (tensor<32x64x16xf32>) -> tensor<32x64x16xf32>
    %245 = stablehlo.dot_general %242, %244, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<32x64x64xf32>, tensor<32x64x16xf32>) -> tensor<32x64x16xf32>
    %246 = stablehlo.reshape %245 : (tensor<32x64x16xf32>) -> tensor<8x4x64x16xf32>
    %247 = stablehlo.transpose %246, dims = [0, 2, 1, 3] : (tensor<8x4x64x16xf32>) -> tensor<8x64x4x16xf32>
    %248 = stablehlo.reshape %247 : (tensor<8x64x4x16xf32>) -> tensor<8x64x64xf32>
    %249 = stablehlo.transpose %arg11, dims = [1, 0] : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %250 = stablehlo.reshape %248 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %251 = stablehlo.dot_general %250, %249, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x64xf32>) -> tensor<512x64xf32>
    %252 = stablehlo.reshape %251 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %253 = stablehlo.add %165, %252 : tensor<8x64x64xf32>
    %254 = stablehlo.power %253, %4 : tensor<8x64x64xf32>
    %255 = stablehlo.reduce(%254 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %256 = stablehlo.reshape %255 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %257 = stablehlo.divide %256, %10 : tensor<8x64x1xf32>
    %258 = stablehlo.add %257, %14 : tensor<8x64x1xf32>
    %259 = stablehlo.rsqrt %258 : tensor<8x64x1xf32>
    %260 = stablehlo.broadcast_in_dim %259, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %261 = stablehlo.multiply %253, %260 : tensor<8x64x64xf32>
    %262 = stablehlo.transpose %arg12, dims = [1, 0] : (tensor<256x64xf32>) -> tensor<64x256xf32>
    %263 = stablehlo.reshape %261 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %264 = stablehlo.dot_general %263, %262, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x256xf32>) -> tensor<512x256xf32>
    %265 = stablehlo.reshape %264 : (tensor<512x256xf32>) -> tensor<8x64x256xf32>
    %266 = stablehlo.maximum %265, %cst_11 : tensor<8x64x256xf32>
    %267 = stablehlo.power %266, %159 : tensor<8x64x256xf32>
    %268 = stablehlo.transpose %arg13, dims = [1, 0] : (tensor<64x256xf32>) -> tensor<256x64xf32>
    %269 = stablehlo.reshape %267 : (tensor<8x64x256xf32>) -> tensor<512x256xf32>
    %270 = stablehlo.dot_general %269, %268, contracting_dims = [1] x [0] : (tensor<512x256xf32>, tensor<256x64xf32>) -> tensor<512x64xf32>
    %271 = stablehlo.reshape %270 : (tensor<512x64xf32>) -> tensor<8x64x64xf32>
    %272 = stablehlo.add %253, %271 : tensor<8x64x64xf32>
    %273 = stablehlo.power %272, %4 : tensor<8x64x64xf32>
    %274 = stablehlo.reduce(%273 init: %cst_7) applies stablehlo.add across dimensions = [2] : (tensor<8x64x64xf32>, tensor<f32>) -> tensor<8x64xf32>
    %275 = stablehlo.reshape %274 : (tensor<8x64xf32>) -> tensor<8x64x1xf32>
    %276 = stablehlo.divide %275, %10 : tensor<8x64x1xf32>
    %277 = stablehlo.add %276, %14 : tensor<8x64x1xf32>
    %278 = stablehlo.rsqrt %277 : tensor<8x64x1xf32>
    %279 = stablehlo.broadcast_in_dim %278, dims = [0, 1, 2] : (tensor<8x64x1xf32>) -> tensor<8x64x64xf32>
    %280 = stablehlo.multiply %272, %279 : tensor<8x64x64xf32>
    %281 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<256x64xf32>) -> tensor<64x256xf32>
    %282 = stablehlo.reshape %280 : (tensor<8x64x64xf32>) -> tensor<512x64xf32>
    %283 = stablehlo.dot_general %282, %281, contracting_dims = [1] x [0] : (tensor<512x64xf32>, tensor<64x256xf32>) -> tensor<512x256xf32>
    %284 = stablehlo.reshape %283 : (tensor<512x256xf32>) -> tensor<8x64x256xf32>
    %285 = stablehlo.convert %cst_17 : (tensor<1xi64>) -> tensor<1xf32>
    %286 = stablehlo.reshape %285 : (tensor<1xf32>) -> tensor<f32>
    %287 = stablehlo.broadcast_in_dim %286, dims = [] : (tensor<f32>) -> tensor<8x64x256xf32>
    %288 = stablehlo.divide %284, %287 : tensor<8x64x256xf32>
    %289 = stablehlo.tanh %288 : tensor<8x64x256xf32>
    %290 = stablehlo.multiply %289, %287 : tensor<8x64x256xf32>
    %291 = stablehlo.reshape %290 : (tensor<8x64x256xf32>) -> tensor<512x256xf32>
    %292 = stablehlo.reshape %arg15 : (tensor<8x64xi64>) -> tensor<512xi64>
    %293 = stablehlo.reduce(%291 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<512x256xf32>, tensor<f32>) -> tensor<512xf32>
    %294 = stablehlo.reshape %293 : (tensor<512xf32>) -> tensor<512x1xf32>
    %295 = stablehlo.broadcast_in_dim %294, dims = [0, 1] : (tensor<512x1xf32>) -> tensor<512x256xf32>
    %296 = stablehlo.subtract %291, %295 : tensor<512x256xf32>
    %297 = stablehlo.exponential %296 : tensor<512x256xf32>
    %298 = stablehlo.reduce(%297 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<512x256xf32>, tensor<f32>) -> tensor<512xf32>
    %299 = stablehlo.reshape %298 : (tensor<512xf32>) -> tensor<512x1xf32>
    %300 = stablehlo.log %299 : tensor<512x1xf32>
    %301 = stablehlo.broadcast_in_dim %300, dims = [0, 1] : (tensor<512x1xf32>) -> tensor<512x256xf32>
    %302 = stablehlo.subtract %296, %301 : tensor<512x256xf32>
    %303 = stablehlo.compare NE, %292, %c_0, SIGNED : (tensor<512xi64>, tensor<512xi64>) -> tensor<512xi1>
    %304 = stablehlo.broadcast_in_dim %303, dims = [0] : (tensor<512xi1>) -> tensor<512xi1>
    %305 = stablehlo.broadcast_in_dim %292, dims = [0] : (tensor<512xi64>) -> tensor<512xi64>
    %306 = stablehlo.select %304, %305, %c : tensor<512xi1>, tensor<512xi64>
    %307 = stablehlo.reshape %306 : (tensor<512xi64>) -> tensor<512x1xi64>
    %308 = stablehlo.iota dim = 0 : tensor<512x1x1xi64>
    %309 = stablehlo.reshape %307 : (tensor<512x1xi64>) -> tensor<512x1x1xi64>
    %310 = stablehlo.concatenate %308, %309, dim = 2 : (tensor<512x1x1xi64>, tensor<512x1x1xi64>) -> tensor<512x1x2xi64>
    %311 = "stablehlo.gather"(%302, %310) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<512x256xf32>, tensor<512x1x2xi64>) -> tensor<512x1xf32>
    %312 = stablehlo.reshape %311 : (tensor<512x1xf32>) -> tensor<512xf32>
    %313 = stablehlo.negate %312 : tensor<512xf32>
    %314 = stablehlo.broadcast_in_dim %313, dims = [0] : (tensor<512xf32>) -> tensor<512xf32>
    %315 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<512xf32>
    %316 = stablehlo.select %304, %314, %315 : tensor<512xi1>, tensor<512xf32>
    %317 = stablehlo.convert %303 : (tensor<512xi1>) -> tensor<512xi64>
    %318 = stablehlo.reduce(%317 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<512xi64>, tensor<i64>) -> tensor<i64>
    %319 = stablehlo.convert %318 : (tensor<i64>) -> tensor<f32>
    %320 = stablehlo.reduce(%316 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<512xf32>, tensor<f32>) -> tensor<f32>
    %321 = stablehlo.divide %320, %319 : tensor<f32>
    return %321 : tensor<f32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      torch_tensor_64_8_torch.float32_1: "0x040000000000000000000000000000000000000000000000000000000000000000000000A46A573F3E399F3E7775CC3D5B81013D57D6233C203E4F3B6E12833A5FCBA539B7C7683F1B54173FF96F4B3EC870813D3ED4A33CDC3DCF3B6912033B5ECB253AC381103EC209503F6D4E973EC0FFC13D1FB9F53C106E1B3C939B443B0CB1783ACFBD41BFDE1D743FD861C73E882E013EDBCB233DCD3C4F3C5812833B5CCBA53A107C75BF7FFC7F3F4477F53E1D3C213EF4B64C3D8085813CDED6A33B313ECF3A8C0F8FBE4E78723F698C103F6E20413ED19C753D466C9B3C599BC43B04B1F83A4630283F6EE84C3F73EB243F50D3603E323E8F3DA552B53CC75FE53BEB11113B95467D3F7E06133FA6A4373F5126803E50AAA33D8E38CF3C1312033C53CB253B3201D33EEE1F953E1D88483F2DC28F3E3E12B83DEF1DE93C3B74133CBA843A3BF8440BBF9770A9BCA46A573F3D399F3E7675CC3D5B81013D58D6233C203E4F3B5CFF7FBF1F41A9BE2B26643F8B87AE3E72D3E03D6B730E3D6B38343C85F7633BD85C09BF24911BBF1D9A6E3F2CA9BD3EAC2BF53D1C651B3D719A443CE7B0783B2220D73E4C1453BFC0AB763F3F9ACC3ED0BE043E6956283D6BFC543C24B5863B72987D3FB3A875BF6F467C3FF456DB3E64E40E3E4647353D575E653CD411913B4479263F75E07FBFD55B7F3F83DBE93E4F06193EAE37423D34C0753C836E9B3B106893BE2EB870BF0EE47F3F3524F83E5024233E95274F3D0111833C31CBA53B251E76BFA9B049BFBFDD7D3FB116033F233E2D3EF4165C3DDE418B3CDD27B03BB34040BFC8A80EBF144E793FB9F9093F8753373EC405693DB372933C8984BA3B6979193E44F68ABEB940723F70B9103F3A64413EFBF3753D7EA39B3C33E1C43BC8B6693F4F67293DB7C7683F1A54173FF86F4B3EC870813D3FD4A33CDC3DCF3B102F563F7236B33E49FB5C3F09C81D3F8376553E3EE7873DF504AC3C849AD93B150511BC26BD1F3F9EF94E3F9413243F96775F3E5C5D8E3DA035B43C2AF7E33BE6A158BFB707563F8AE63E3F1F352A3FF072693E1BD3943D3F66BC3CCF53EE3BFCD367BF9C18773F26EB2C3F172B303F5168733E79489B3DD196C43C72B0F83B388707BE64A87F3F7835193FF8F3353F77577D3E71BDA13D57C7CC3C8A86013C0837433FB0DD6E3FE4F7033F458E3B3F10A0833E0032A83DCFF7D43CDAB4063C0ED5743FCC62463F88D1DA3E8FF8403F0591883E20A6AE3D3A28DD3C29E30B3C2AB48A3E683B0A3F9383AB3E7431463F7D7E8D3ECD19B53D9658E53C7711113CE9E329BF71BD803EC1FD743E9D374B3F5468923E058DBB3DE388ED3CC43F163CA4EF7CBF46037EBDC381103EC209503F6C4E973EC1FFC13D20B9F53C106E1B3C06DECEBE2B18BDBE56502A3DA5A6543FA5309C3EFD71C83D4DE9FD3C5B9C203C4D2A0D3FA8D723BFC7196FBD190D593FDE0EA13EB7E3CE3DB50C033DA6CA253C39FA7F3FB2E358BF138821BEFE3B5D3FF7E8A53EE954D53DBA24073DEFF82A3CF771073F7A6D78BF4CD682BE4132613FD2BEAA3E8FC5DB3DB83C0B3D3727303CC23ADBBE53547FBFDC99B3BEDFEE643F4D90AF3EA535E23DAB540F3D7D55353C38E57DBF0CE96CBF0F92E2BEE370683F495DB43E27A5E83D966C133DC3833A3CEABE24BF3AFF42BF58A307BF67B76B3FA925B93E1114EF3D7684173D07B23F3C9FBD973EF1BE05BFB7A21CBF94C16E3F4AE9BD3E5D82F53D4D9C1B3D4AE0443C4BBB763FC9EC6CBE731130BFA38E713F0EA8C23E09F0FB3D19B41F3D8C0E4A3CBCBF3E3F3442A93DCFBD41BFDE1D743FD761C73E882E013EDCCB233DCD3C4F3CFB6D22BE3DE5C63E9B7A51BF9B6E763F8616CC3EB664043E93E3273D0C6B543C28A16ABF32E0273F991F5FBF4380783FFAC5D03E8F9A073E40FB2B3D4A99593C30EF54BFE6A75B3FDB896ABF4F527A3F1670D53E0ED00A3EE012303D86C75E3CA103913C1DA7793F329C73BF47E47B3FBD14DA3E32050E3E762A343DC1F5633CD0D4593F4BE47E3F6A3F7ABFC4357D3FCDB3DE3EF939113E0042383DFA23693C9ADB663F6EDA6A3F88627EBF70467E3F2A4DE33E616E143E7E593C3D32526E3CE813FD3D42863F3FF9FA7FBF06167F3FB6E0E73E67A2173EEF70403D6880733C56AC44BFD433013FA4047FBF50A47F3F526EEC3E0AD61A3E5388443D9CAE783C222974BFFC44583E03827BBF29F17F3FE0F5F03E48091E3EAB9F483DCFDC7D3CFF5586BEBC6FD3BD107C75BF7FFC7F3F4477F53E1E3C213EF5B64C3D8085813C24942B3F859CD0BE32026DBF4DC67F3F5EF2F93E8B6E243E33CE503D991C843CA0937C3F65D62BBF132A62BFA34E7F3F1267FE3E8CA0273E62E5543DAFB3863CB4B6CA3E0C545EBF790F55BF9E957E3FA26A013F1FD22A3E84FC583DC64A893CCD0C0FBF6CC57ABFE4D345BF6E9B7D3F6A9E033F41032E3E97135D3DDAE18B3CF4EF7FBF58587EBF4A9E34BF53607C3FD5CE053FF233313E9D2A613DEF788E3C5E8405BF17B268BFB29A21BF9DE47A3FD2FB073F2F64343E9241653D0210913CFD50DF3E5AF83BBFB6F90CBFAE28793F53250A3FF693373E7A58693D15A7933CE72C7E3F2235F9BE51E0EDBEF82C773F4C4B0C3F44C33A3E516F6D3D263E963C4301233F418543BEC06CBFBEFDF1743FAD6D0E3F18F23D3E1A86713D37D5983C23109CBE1C86FD3D8C0F8FBE4E78723F688C103F6F20413ED29C753D466C9B3C7F5377BFD73CDA3ED5883ABE8EC06F3F71A7123F474E443E7BB3793D55039E3CF23A3DBFB9B92F3FA12AAABD6ECB6C3FB8BE143FA07B473E12CA7D3D629AA03C4B5F2B3EE7E7603FB4BD893CB299693F31D2163F75A84A3E4DF0803D6E31A33C",
      torch_tensor_64_8_torch.float32: "0x040000000000803F0000803F0000803F0000803F0000803F0000803F0000803F0000803F41510A3F6B4E733F98B87E3F3CDF7F3FB9FC7F3FACFF7F3FF8FF7F3FFFFF7F3F3311D5BEEC7B4E3FA5E57A3FF97C7F3FE5F27F3FB1FE7F3FDFFF7F3FFDFF7F3F26707DBF582F153FEF90743F4FD97E3F83E27F3F0DFD7F3FB5FF7F3FF9FF7F3F305527BFB12E9A3EA7CA6B3F69F47D3F94CB7F3FC2FA7F3F7AFF7F3FF3FF7F3F2C3C913EE97229BC40A9603F81CE7C3F19AE7F3FCFF77F3F2EFF7F3FEBFF7F3FB8CD753F6D3FA4BE3249533FE3677B3F128A7F3F34F47F3FD2FE7F3FE2FF7F3FBDFF403FBC7419BFB3CC433FEAC0793F815F7F3FF2EF7F3F65FE7F3FD7FF7F3FF6FD14BEE59151BF5F5B323F02DA773F652E7F3F08EB7F3FE7FD7F3FCAFF7F3FD53F69BFA2E674BFD4211F3FA9B3753FC2F67E3F76E57F3F59FD7F3FBCFF7F3F64CD56BFFBF17FBF41510A3F6B4E733F98B87E3F3CDF7F3FB9FC7F3FACFF7F3F7205913B8D9B71BFC03DE83EE4AA703FE8737E3F5BD87F3F09FC7F3F9BFF7F3FD006583F564F4BBFF386B93EC3C96D3FB5287E3FD2D07F3F48FB7F3F87FF7F3F6F4E683F9DD910BF99F5883EC3AB6A3F00D77D3FA1C87F3F76FA7F3F72FF7F3FD7040C3E0A0D90BEDF0B2E3EB151673FCC7E7D3FC9BF7F3F94F97F3F5CFF7F3FE87A42BF9622FE3CAADE903D68BC633F1A207D3F49B67F3FA1F87F3F43FF7F3F2C2975BF2F3EAE3EE333EFBCD4EC5F3FEDBA7C3F22AC7F3F9DF77F3F29FF7F3F36E28CBE51A91D3FD3EF03BEEEE35B3F494F7C3F53A17F3F88F67F3F0EFF7F3F840A293FE890543FAFA768BEBFA2573F2EDD7B3FDC957F3F62F57F3FF0FE7F3FBF1B7D3F0764763F3586A5BE5D2A533FA1647B3FBE897F3F2CF47F3FD1FE7F3F22F0D03EEDC77F3F3311D5BEED7B4E3FA5E57A3FF97C7F3FE5F27F3FB1FE7F3FFC370CBF39CE6F3F9A3D01BFA198493F3C607A3F8C6F7F3F8DF17F3F8EFE7F3F6FFD7FBF7A0C483F03A816BFBB81443F6AD4793F77617F3F24F07F3F6AFE7F3FBF6708BF04740C3F10912ABF89383F3F3442793FBC527F3FABEE7F3F44FE7F3FFE2DD93EAFDB853ED7C53CBF63BE393F9BA9783F59437F3F20ED7F3F1DFE7F3F78BF7D3F31B853BDBF174DBFB114343FA50A783F4E337F3F85EB7F3FF4FD7F3F819C253FDB29B8BE115D5BBFE73C2E3F5665773F9D227F3FDAE97F3FC9FD7F3F389395BEA1CC21BF467167BF8338283FB1B9763F44117F3F1DE87F3F9DFD7F3F576D76BFAA7857BF7C3571BF0E09223FBB07763F44FF7E3F50E67F3F6EFD7F3FB3803FBF6DC677BFB79078BF20B01B3F794F753F9DEC7E3F72E47F3F3FFD7F3F18F41D3EDC817FBF26707DBF582F153FEF90743F4FD97E3F83E27F3F0DFD7F3F8E2C6A3FA0E66DBF52C77FBF5F880E3F22CC733F5AC57E3F83E07F3FDAFC7F3FA98F553FB5B344BF3F907FBFEABC073F1801733FBEB07E3F73DE7F3FA5FC7F3FB78659BC09FF07BF7ACB7CBFB7CE003FD52F723F7B9B7E3F52DC7F3F6FFC7F3FE73B59BF193777BE168077BF147FF33E5F58713F91857E3F20DA7F3F36FC7F3F5F5867BF3324943DA0BB6FBF6622E53EBB7A703F006F7E3FDDD77F3FFCFB7F3FEA0803BE4D01C23EF59165BF118BD63EEF966F3FC9577E3F89D57F3FC1FB7F3F2DF2433F32DE253F151D59BFD1BCC73E01AD6E3FEB3F7E3F25D37F3F84FB7F3FB57F743FC9485A3FDD7C4ABF70BBB83EF7BC6D3F66277E3FB0D07F3F45FB7F3F6C85883EB40D793FB2D639BFC58AA93ED7C66C3F3B0E7E3F2ACE7F3F04FB7F3F74BC2ABFCD1F7F3F305527BFB52E9A3EA7CA6B3F69F47D3F94CB7F3FC2FA7F3F44C27CBFF5E46B3FAB2713BF28AB8A3E6EC86A3FF1D97D3FEDC87F3F7EFA7F3FE0CACCBE6945413F6F03FBBE4208763E32C0693FD2BE7D3F35C67F3F38FA7F3FE81B0E3F307B033F8735CDBE387B563EFBB1683F0DA37D3F6CC37F3FF1F97F3FBBF57F3FFD9B623EB95A9DBE47B7363ECE9D673FA2867D3F92C07F3FA8F97F3F817B063F945BBEBDDBDA57BE91C4163EB483663F91697D3FA8BD7F3F5DF97F3F6E46DDBE9CC3CBBE46B0E5BD8756ED3DB263653FDA4B7D3FADBA7F3F11F97F3FB2097EBFA5DD29BF9FF84ABC2AE7AC3DD23D643F7D2D7D3FA1B77F3FC3F87F3F80E023BF00015DBFC432B33D1597583D1912633F790E7D3F84B47F3F73F87F3F44E7993EB0397ABF20FD3E3ECA50AE3C91E0613FD0EE7C3F57B17F3F22F87F3F0408773FCEA17EBF2C3C913E697229BC40A9603F81CE7C3F19AE7F3FCFF77F3FD1FD3D3F73C969BF4A86C13EC2D62BBD2F6C5F3F8DAD7C3FCAAA7F3F7AF77F3F0EE726BEE7C13DBF73E1EF3E769296BD66295E3FF38B7C3F6AA77F3F24F77F3F95146BBFDFD1FDBE7DEB0D3F0013D7BDEDE05C3FB3697C3FFAA37F3FCCF67F3FA64D54BFD1E74DBE3D7B223F3EAE0BBECC925B3FCE467C3F79A07F3F72F67F3F2C43B53C1B7EE83D626B353F3BAF2BBE0C3F5A3F44237C3FE79C7F3F17F67F3FA26C5A3F9A6FD53E7B8B463F4D844BBEB6E5583F14FF7B3F44997F3FB9F57F3FAC5D663F70CA2D3FBFAF553F3F256BBED386573F3FDA7B3F91957F3F5BF57F3FB714F43D02A15F3F6AB1623F004585BE6B22563FC5B47B3FCD917F3FFAF47F3F836545BF464A7B3F3B6F6D3F43D594BE87B8543FA78E7B3FF88D7F3F98F47F3F56D173BFEB077E3FB8CD753F6D3FA4BE3249533FE3677B3F128A7F3F34F47F3FE62584BE5D94673F7BB77B3F8B7FB3BE74D4513F7B407B3F1C867F3FCFF37F3FF76A2C3FA7293A3F621D7F3FB791C2BE575A503F6E187B3F14827F3F68F37F3FB8637C3F5A91F43EBCF67F3F1572D1BEE4DA4E3FBCEF7A3FFD7D7F3FFFF27F3F"
    }
  }
#-}

